"""What is measured on: windows of a text and lines of a job, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import BOS_ID, EOS_ID, build_tokenizer, save_tokenizer

from dspark.converters.quality import windows
from dspark.converters.quality.windows import held_out_samples, leading_tokens, line_samples, resolve_context, text_windows
from dspark.runtime.jobs.tokenizer import TextCodec, load_codec
from dspark.runtime.spec.errors import InputError, UsageError

CONFIG = SimpleNamespace(context_length=64, vocab_size=320)
TEXT = "the river runs under the old stone bridge and the mill turns slowly"


def codec_in(directory: Path, template: str | None = None) -> TextCodec:
    """The tiny tokenizer; template: what it puts around a prompt, such as "<|bos|> $A"."""
    tokenizer = build_tokenizer()
    if template is not None:
        from tokenizers.processors import TemplateProcessing

        specials = [("<|bos|>", BOS_ID), ("<|eos|>", EOS_ID)]
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=specials)
    save_tokenizer(directory, tokenizer)
    return load_codec(directory)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_what_was_held_out_is_taken_up_to_the_tokens_that_are_wanted(text: Path) -> None:
    found = held_out_samples(text, [[1, 2, 3], [4], list(range(90)), [5, 6, 7, 8]], 64, 70)
    assert found.samples == [[1, 2, 3], list(range(64)), [5, 6, 7]] and found.kind == "held-out"
    assert found.describe() == "3 samples that the quantizer was not shown"


def test_windows_do_not_overlap_and_the_rest_is_left(text: Path, tmp_path: Path) -> None:
    codec = codec_in(tmp_path / "t")
    ids = codec.encode(TEXT)
    found = text_windows(text, codec, CONFIG, 4)
    count, left = divmod(len(ids), 4)
    assert count > 2 and left
    assert found.samples == [ids[4 * i : 4 * i + 4] for i in range(count)]
    assert found.num_scored == 3 * count
    assert found.notes == (f"{left} tokens behind the last whole window are not used",)
    assert found.describe() == f"{count} windows of 4 tokens" and found.kind == "text"


def test_every_window_begins_as_a_prompt_does(text: Path, tmp_path: Path) -> None:
    """Models that are trained with BOS lose much without it, so a window without it would measure the wrong thing."""
    codec = codec_in(tmp_path / "t", "<|bos|> $A <|eos|>")
    ids = codec.encode(TEXT)
    assert leading_tokens(codec) == [BOS_ID]
    samples = text_windows(text, codec, CONFIG, 4).samples
    assert samples == [[BOS_ID, *ids[3 * i : 3 * i + 3]] for i in range(len(ids) // 3)]


def test_the_bound_on_tokens_takes_whole_windows_from_the_beginning(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text is not tokenized to its end, and the tokens are those of the whole text all the same."""
    codec = codec_in(tmp_path / "t", "<|bos|> $A")
    text.write_text(" ".join([TEXT] * 200))
    whole = text_windows(text, codec, CONFIG, 8)
    encoded: list[int] = []
    original = TextCodec.encode
    monkeypatch.setattr(windows, "CHARACTERS_PER_TOKEN", 1)
    monkeypatch.setattr(
        TextCodec, "encode", lambda self, text, *rest, **more: encoded.append(len(text)) or original(self, text, *rest, **more)
    )
    part = text_windows(text, codec, CONFIG, 8, max_tokens=30)
    assert part.samples == whole.samples[:3] and part.notes == ()
    assert max(encoded) < len(TEXT) * 100
    assert part.xxh3 == whole.xxh3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"caf\xe9 and more", "is not UTF-8: byte 0xe9 at offset 3"),
        (b"the river", "one window of 16 needs 16"),
        (None, "cannot be read"),
    ],
)
def test_unusable_texts_are_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        text_windows(path, codec_in(tmp_path / "t"), CONFIG, 16)


def test_a_short_text_says_what_would_do(text: Path, tmp_path: Path) -> None:
    codec = codec_in(tmp_path / "t", "<|bos|> $A")
    have = len(codec.encode(TEXT))
    with pytest.raises(InputError) as raised:
        text_windows(text, codec, CONFIG, 64)
    assert raised.value.one_line() == (
        f"text '{text}' has {have} tokens, one window of 64 needs 63; give more text, or type --context-length {have + 1} or less"
    )
    assert len(text_windows(text, codec, CONFIG, have + 1).samples) == 1


def test_a_byte_order_mark_is_no_text(text: Path, tmp_path: Path) -> None:
    codec = codec_in(tmp_path / "t")
    plain = text_windows(text, codec, CONFIG, 4).samples
    text.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    assert text_windows(text, codec, CONFIG, 4).samples == plain


def test_bounds_that_leave_nothing_are_usage_errors(text: Path, tmp_path: Path) -> None:
    codec = codec_in(tmp_path / "t")
    with pytest.raises(UsageError, match="at most 7 tokens are wanted, one window has 8"):
        text_windows(text, codec, CONFIG, 8, max_tokens=7)
    with pytest.raises(UsageError, match="--context-length is 65, the model's context is 64"):
        resolve_context(CONFIG, 65)
    assert resolve_context(CONFIG, None) == 64
    assert resolve_context(SimpleNamespace(context_length=8192), None) == 2048


def lines_file(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_lines_are_rendered_as_the_job_renders_them(tmp_path: Path) -> None:
    codec = codec_in(tmp_path / "t", "<|bos|> $A")
    user = {"role": "user", "content": "count one two"}
    path = lines_file(
        tmp_path,
        {"custom_id": "a", "messages": [user]},
        "",
        {"custom_id": "b", "messages": [user, {"role": "assistant", "content": "three four"}]},
        {"prompt": "the river runs"},
        {"prompt": [5, 6, 7]},
        {"method": "POST", "url": "/v1/chat/completions", "body": {"messages": [user]}},
    )
    found = line_samples(path, codec, CONFIG, 60)
    asked = codec.encode("<|user|>count one two\n<|assistant|>")
    answered = codec.encode("<|user|>count one two\n<|assistant|>three four\n")
    assert found.samples == [asked, answered, [BOS_ID, *codec.encode("the river runs")], [5, 6, 7], asked]
    assert found.kind == "prompts" and found.notes == () and found.describe() == "5 lines of up to 60 tokens"


def test_lines_that_cannot_be_served_are_left_out_and_counted(tmp_path: Path) -> None:
    codec = codec_in(tmp_path / "t")
    path = lines_file(tmp_path, {"prompt": [5, 6, 7]}, "{broken", {"prompt": [9]}, {"prompt": [400, 1]}, {"prompt": list(range(3, 43))})
    found = line_samples(path, codec, CONFIG, 8)
    assert found.samples == [[5, 6, 7], list(range(3, 11))]
    assert found.notes[0] == "1 line is longer and cut"
    assert found.notes[1].startswith("3 that cannot be served left out, the first is line 2: ")


def test_the_bound_on_tokens_cuts_the_last_line(tmp_path: Path) -> None:
    path = lines_file(tmp_path, *({"prompt": [5, 6, 7, 8]} for _ in range(5)))
    found = line_samples(path, codec_in(tmp_path / "t"), CONFIG, 60, max_tokens=7)
    assert found.samples == [[5, 6, 7, 8], [5, 6, 7]]


def test_a_file_without_a_usable_line_is_refused(tmp_path: Path) -> None:
    path = lines_file(tmp_path, {"prompt": "x", "temprature": 1}, {"prompt": [9]})
    with pytest.raises(InputError, match=r"no line of .* can be used \(line 1: .*temprature"):
        line_samples(path, codec_in(tmp_path / "t"), CONFIG, 60)
