"""`dspark pair`: mismatches in one message, a table, and an engine that loads at every instant."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from engine_runs import tiny_engine
from tiny_models import PROMPTS, build_tokenizer, make_tiny_checkpoint, save_tokenizer

from dspark.converters.pipeline import convert
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.speculation.choice import Choice, choose_speculation
from dspark.runtime.speculation.pairing import Machine, Pairing, load_pairing
from dspark_cli.app import run

MACHINE = Machine("a processor, 2 cores", "cpu", 2, "float32")


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("draft"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("lines") / "job.jsonl"
    body = [{"prompt": prompt, "max_tokens": 8, "temperature": 0.7 * (i % 2)} for i, prompt in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in body) + "{not json\n")
    return path


def pair(engine: Path, *flags: Any) -> int:
    return run(["pair", str(engine), "--threads", "1", "--rounds", "1", "--max-num-seqs", "4", *map(str, flags)])


def test_the_alternatives_are_measured_and_one_is_stored(engine: Path, draft: Path, lines: Path, capsys) -> None:
    before = sorted(path.name for path in engine.iterdir())
    assert pair(engine, "--draft", draft, "--prompts", lines, "--dry-run") == 0
    assert sorted(path.name for path in engine.iterdir()) == before
    out = capsys.readouterr().out
    for method in ("off", "ngram", "draft-model", "ngram+draft-model"):
        assert f" {method} " in out
    assert "acceptance by position" in out
    assert pair(engine, "--draft", draft, "--prompts", lines, "--method", "draft-model") == 0
    pairing = load_pairing(engine)
    assert pairing is not None and pairing.method == "draft-model" and pairing.draft == "draft"
    assert [row["method"] for row in pairing.measured] == ["off", "draft-model"]
    assert not [row for row in pairing.measured if row["differing_lines"]]  # float32
    assert choose_speculation(EngineConfig(speculative="auto"), engine) == Choice("draft-model", engine / "draft", pairing)
    assert choose_speculation(EngineConfig(speculative="draft-model"), engine).draft == engine / "draft"
    assert not [path for path in engine.iterdir() if path.name.startswith(".")]
    capsys.readouterr()
    assert run(["inspect", str(engine)]) == 0
    assert "drafts" in capsys.readouterr().out
    assert pair(engine, "--method", "off") == 0  # the draft stays for --speculative draft-model
    assert choose_speculation(EngineConfig(speculative="auto"), engine).method == "off"
    assert choose_speculation(EngineConfig(speculative="draft-model"), engine).method == "draft-model"


def test_every_mismatch_stands_in_one_message(engine: Path, tmp_path: Path, capsys) -> None:
    other = tiny_engine(tmp_path)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token if index < 3 else f"{token}\u4e00": index for token, index in vocab.items()}
    tokenizer["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<|pad|>", "eos_token": "<|bos|>"}))
    assert pair(engine, "--draft", other, "--method", "draft-model") == 2
    message = capsys.readouterr().err
    for part in ("its vocabulary has", "its bos_token is '<|pad|>'", "its eos_token is '<|bos|>'"):
        assert part in message
    assert message.count("error:") == 1 and not (engine / ".draft.tmp").exists()


def test_a_draft_of_another_vocabulary_is_refused_by_its_first_difference(engine: Path, tmp_path: Path, capsys) -> None:
    """Two ids swapped, a smaller vocabulary, bos and eos swapped (case B34). Sizes say nothing, and nothing is mapped unasked."""
    swapped = tiny_engine(tmp_path / "swapped")
    tokenizer = json.loads((swapped / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = (next(token for token, index in vocab.items() if index == wanted) for wanted in (103, 104))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (swapped / "tokenizer.json").write_text(json.dumps(tokenizer))
    checkpoint = make_tiny_checkpoint(tmp_path / "smaller" / "checkpoint", "llama", vocab_size=300)
    save_tokenizer(checkpoint, build_tokenizer(300))
    convert(checkpoint, tmp_path / "smaller" / "engine", dtype="float32", audit=False)
    other = tiny_engine(tmp_path / "other")
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<|eos|>", "eos_token": "<|bos|>"}))
    before = sorted(path.name for path in engine.iterdir())
    for draft, reason in (
        (swapped, f"id 103 is {first!r} in the target and {second!r} in the draft"),
        (tmp_path / "smaller" / "engine", "in the target and no token in the draft"),
        (other, "its bos_token is '<|eos|>', the target's '<|bos|>'; its eos_token is '<|bos|>', the target's '<|eos|>'"),
    ):
        capsys.readouterr()
        assert pair(engine, "--draft", draft, "--method", "draft-model") == 2
        message = capsys.readouterr().err
        assert reason in message and message.count("\n") == 1
    assert sorted(path.name for path in engine.iterdir()) == before
    copy = shutil.copytree(engine, tmp_path / "copy")
    assert pair(copy, "--draft", swapped, "--method", "draft-model", "--map-vocabulary") == 0
    assert "mapped by token strings, 320 of the target's 320 tokens" in capsys.readouterr().err
    assert (copy / "draft" / "vocabulary.json").is_file()
    assert pair(copy, "--draft", other, "--method", "draft-model", "--map-vocabulary") == 2  # what ends a text is another matter


def test_what_cannot_be_is_refused(engine: Path, tmp_path: Path, capsys) -> None:
    assert pair(engine) == 2  # nothing to measure on
    assert "--prompts" in capsys.readouterr().err
    assert pair(engine, "--method", "eagle3", "--draft", tmp_path / "none") == 2
    assert pair(tmp_path, "--method", "ngram") == 2


def test_step_times_hold_on_such_a_machine_only() -> None:
    pairing = Pairing("ngram", None, MACHINE, step_cost_ms={"1": 2.0, "16": 4.0})
    assert pairing.cost_points(MACHINE) == {1: 0.002, 16: 0.004}
    assert pairing.cost_points(Machine(MACHINE.processor, "cpu", 4, "float32")) == {}


@pytest.mark.parametrize("content", ["{", '{"schema_version": "2.0"}', '{"schema_version": "1.0", "method": "magic"}', "[]"])
def test_a_damaged_pairing_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "pairing.json").write_text(content)
    with pytest.raises(InputError, match=r"pairing\.json"):
        load_pairing(tmp_path)


def test_flags_that_do_not_go_together(tmp_path: Path) -> None:
    for config in (
        EngineConfig(draft="somewhere"),
        EngineConfig(draft_memory="file"),
        EngineConfig(speculative="draft-model", draft_memory="file", draft="somewhere"),
        EngineConfig(speculative="dspark"),
    ):
        with pytest.raises(UsageError):
            choose_speculation(config, tmp_path)
    assert choose_speculation(EngineConfig(speculative="auto"), tmp_path) == Choice("ngram")


def test_auto_is_what_was_measured_and_ngrams_before_a_draft_that_was_not(engine: Path, draft: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(engine, tmp_path / "engine", ignore=shutil.ignore_patterns("pairing.json", "draft"))
    named = EngineConfig(speculative="auto", draft=str(draft))
    assert choose_speculation(named, copy) == Choice("ngram+draft-model", draft)
    for method in ("draft-model", "ngram+draft-model"):
        pairing = Pairing(method, "draft", MACHINE)
        (copy / "pairing.json").write_bytes(pairing.to_bytes())
        shutil.copytree(draft, copy / "draft", dirs_exist_ok=True)
        assert choose_speculation(EngineConfig(speculative="auto"), copy) == Choice(method, copy / "draft", pairing)
        assert choose_speculation(named, copy) == Choice(method, draft, pairing)
    assert Choice("ngram+draft-model").drafter == "draft-model" and Choice("ngram+draft-model").has_ngrams
    assert Choice("ngram").drafter is None and Choice("ngram").has_ngrams
    assert not Choice("draft-model").has_ngrams and not Choice("off").has_ngrams
