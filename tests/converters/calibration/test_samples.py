"""What calibration reads, what it refuses, and that the order of a file does not matter."""

import json
from pathlib import Path

import pytest
from tiny_models import make_tiny_checkpoint, save_tokenizer

from dspark.converters.calibration.samples import SampleRequest, load_samples
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.models.hf_config import model_config_from_hf
from dspark.runtime.spec.errors import InputError

SENTENCES = [f"the river runs under bridge number {n} and on to the sea" for n in range(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    checkpoint = make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")
    save_tokenizer(checkpoint)
    return load_codec(checkpoint), model_config_from_hf(json.loads((checkpoint / "config.json").read_text()))


def write(path: Path, lines: list[dict | str]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_lines_are_rendered_through_the_template(model, tmp_path) -> None:
    codec, config = model
    chat = [{"role": "user", "content": SENTENCES[0]}]
    answered = [*chat, {"role": "assistant", "content": SENTENCES[1]}]
    lines = [{"messages": chat}, {"messages": answered}, {"prompt": SENTENCES[2]}, {"text": SENTENCES[3]}, {"prompt": [5, 6, 7]}]
    found = load_samples(SampleRequest(write(tmp_path / "in.jsonl", lines)), codec, config)
    expected = [
        codec.encode(codec.render_chat(chat, True)),
        codec.encode(codec.render_chat(answered, False)),
        codec.encode(SENTENCES[2], add_special_tokens=True),
        codec.encode(SENTENCES[3], add_special_tokens=True),
        [5, 6, 7],
    ]
    assert sorted(found.samples) == sorted(expected)


def test_the_order_of_the_file_changes_nothing(model, tmp_path) -> None:
    """Neither which samples are taken, nor the order in which they are computed."""
    codec, config = model
    lines = [{"text": text} for text in SENTENCES]
    sets = [
        load_samples(SampleRequest(write(tmp_path / f"{i}.jsonl", order), num_samples=20), codec, config)
        for i, order in enumerate((lines, lines[::-1], lines[13:] + lines[:13]))
    ]
    assert sets[0].samples == sets[1].samples == sets[2].samples
    assert len(sets[0].samples) == 20 and sets[0].digest == sets[1].digest


def test_unusable_lines_are_named_and_the_rest_is_used(model, tmp_path) -> None:
    codec, config = model
    lines = [{"text": SENTENCES[0]}, "{not json", {"text": ""}, {"prompt": [7] * 9}, {"text": SENTENCES[0]}, {"text": SENTENCES[1]}]
    found = load_samples(SampleRequest(write(tmp_path / "in.jsonl", lines)), codec, config)
    assert len(found.samples) == 2
    notes = " ".join(found.notes)
    assert "2 lines cannot be used: line 2" in notes and "line 3" in notes
    assert "1 samples are one token repeated and are left out: numbers 4" in notes
    assert "1 samples repeat an earlier one and are left out: numbers 5" in notes
    assert "tokens in 2 samples" in notes


@pytest.mark.parametrize("content", ["", "\n  \n", "the\n"])
@pytest.mark.parametrize("name", ["in.jsonl", "in.txt"])
def test_too_little_is_refused_with_figures(model, tmp_path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content if name.endswith("txt") else "".join(json.dumps({"text": w}) + "\n" for w in content.split()))
    with pytest.raises(InputError, match="needed: at least 32 tokens"):
        load_samples(SampleRequest(path), *model)


def test_a_text_becomes_windows_and_no_token_is_lost(model, tmp_path) -> None:
    codec, config = model
    text = " ".join(str(n * n) for n in range(400))
    (tmp_path / "in.txt").write_text(text)
    found = load_samples(SampleRequest(tmp_path / "in.txt", num_samples=1000, sample_tokens=32), codec, config)
    tokens, begin = codec.encode(text), len(codec.encode("", add_special_tokens=True)[:1])
    assert found.num_tokens == len(tokens) + begin * len(found.samples)
    assert max(map(len, found.samples)) == 32


def test_a_long_text_is_read_in_many_places(model, tmp_path) -> None:
    codec, config = model
    (tmp_path / "in.txt").write_text("".join(f"line {n} of many lines\n" for n in range(20_000)))
    found = load_samples(SampleRequest(tmp_path / "in.txt", num_samples=64, sample_tokens=16), codec, config)
    assert len(found.samples) == 64
    assert any("in 64 places" in note for note in found.notes)


def test_other_encodings_and_missing_files_are_refused(model, tmp_path) -> None:
    (tmp_path / "in.txt").write_bytes("naïve".encode("utf-16"))
    with pytest.raises(InputError, match="no UTF-8 text"):
        load_samples(SampleRequest(tmp_path / "in.txt"), *model)
    with pytest.raises(InputError, match="cannot be read"):
        load_samples(SampleRequest(tmp_path / "absent.jsonl"), *model)
