"""The quantization comparison: what is shown to all, what is compared with what, and the arithmetic of the table."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from source_tree import ROOT
from tokenizers import Tokenizer, models, pre_tokenizers

sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "peers")]

import corpus  # noqa: E402
import quantization  # noqa: E402
import quantize_run  # noqa: E402
import scores  # noqa: E402

from dspark_cli.quantize import QuantizeOptions  # noqa: E402


@pytest.fixture
def tokenizer() -> Tokenizer:
    """One id per word; w7 -> 7."""
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(400)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def documents(first: int, count: int, words: int) -> list[str]:
    """count documents of `words` words; document i has word first + i only."""
    return [f"w{first + i} " * words for i in range(count)]


def test_no_document_is_in_both_sets(tokenizer: Tokenizer) -> None:
    """Calibration text in the evaluation would flatter what fits it best."""
    domains = {"a": documents(1, 40, 10), "b": documents(100, 40, 10)}
    kinds = corpus.build(domains, tokenizer, (5, 12), 16)
    seen = {kind: {token for row in rows for token in row["prompt"]} for kind, rows in kinds.items()}
    assert not seen["evaluation"] & seen["calibration"]
    assert [len(rows) for rows in kinds.values()] == [5, 12]
    assert {len(row["prompt"]) for rows in kinds.values() for row in rows} == {16}
    assert [sum(row["custom_id"].startswith(name) for row in kinds["calibration"]) for name in domains] == [6, 6]
    assert kinds == corpus.build(domains, tokenizer, (5, 12), 16)


def test_too_little_text_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(SystemExit, match="too little text for 12 rows of 16 tokens"):
        corpus.build({"a": documents(1, 20, 10)}, tokenizer, (5, 12), 16)


def test_written_rows_are_lines_of_a_job(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dspark quantize --calibration` and the peers read the same file."""
    kinds = corpus.build({"a": documents(1, 60, 10)}, tokenizer, (2, 4), 16)
    record = corpus.write(tmp_path, kinds, tokenizer)
    assert scores.read_rows(tmp_path / "calibration.jsonl") == kinds["calibration"]
    assert record["calibration"]["domains"] == {"a": 4}
    assert record["evaluation"]["sha256"] == quantization.sha256(tmp_path / "evaluation.jsonl")
    args = SimpleNamespace(model=tmp_path, out=tmp_path / "out", samples=tmp_path / "calibration.jsonl", rows=3, result=tmp_path / "r")
    monkeypatch.chdir(tmp_path)  # the runner goes into a folder of its own
    assert quantize_run.Run(args).rows == [row["prompt"] for row in kinds["calibration"][:3]]


def test_a_conversation_is_rendered_with_its_answer() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    lines = [{"messages": [{"role": "user", "content": "a?"}]}, {"messages": [{"role": "user", "content": "b?"}]}]
    answers = [{"text": "a.", "error": None}, {"error": {"code": "x"}}]
    assert corpus.chat(template, lines, answers) == ["<user>a?\n<assistant>a.\n"]


def test_standard_errors_by_hand() -> None:
    assert scores.standard_error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3))
    assert math.isnan(scores.standard_error([1.0]))


def test_the_increase_is_paired() -> None:
    """Rows of very different difficulty, each worse by about 0.1 nats: the error is that of the differences 0.1, 0.1, 0.1."""
    base = {"nll": [1.0, 3.0, 8.0], "kl": [0.0] * 3, "agreement": [1.0] * 3}
    ours = {"nll": [1.1, 3.1, 8.1], "kl": [0.1, 0.2, 0.3], "agreement": [0.5, 0.5, 0.8]}
    summary = scores.summarize(ours, base)
    assert summary["ppl"] == pytest.approx(math.exp(4.1))
    assert summary["ppl_increase_pct"] == pytest.approx(100 * math.expm1(0.1))
    assert summary["ppl_increase_pct_se"] == pytest.approx(0.0, abs=1e-9)
    assert summary["kl"] == pytest.approx(0.2) and summary["kl_se"] == pytest.approx(0.1 / math.sqrt(3))
    assert summary["agreement_pct"] == pytest.approx(60.0)


def test_two_engines_are_compared_row_by_row() -> None:
    ours = {"nll": [1.0, 2.0], "kl": [0.09, 0.18], "agreement": [1.0, 1.0]}
    theirs = {"nll": [1.1, 2.1], "kl": [0.1, 0.2], "agreement": [1.0, 1.0]}
    difference = scores.paired(ours, theirs)
    assert difference["ppl_pct"] == pytest.approx(100 * math.expm1(-0.1))
    assert difference["kl_pct"] == pytest.approx(-10.0) and difference["kl_pct_se"] == pytest.approx(0.0, abs=1e-9)


def test_kept_scores_belong_to_one_engine_and_one_set_of_rows(tmp_path: Path) -> None:
    made = {"nll": [1.0], "kl": [0.1], "agreement": [1.0]}
    scores.store(tmp_path / "a.json", {"rows": "1"}, made)
    assert scores.stored(tmp_path / "a.json", {"rows": "1"}) == made
    assert scores.stored(tmp_path / "a.json", {"rows": "2"}) is None
    assert scores.stored(tmp_path / "b.json", {"rows": "1"}) is None


def test_noise_is_relative_to_a_row_and_the_same_each_time(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    rows = torch.randn(8, 512, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 9)[:, None]
    save_file({"model.layers.0.mlp.up_proj.weight": rows, "model.norm.weight": torch.ones(4)}, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    noisy = []
    for name in ("one", "two"):
        quantization.noisy_copy(source, tmp_path / name, 0.02)
        noisy.append(load_file(tmp_path / name / "model.safetensors"))
    change = (noisy[0]["model.layers.0.mlp.up_proj.weight"] - rows).std(-1) / rows.std(-1)
    assert change == pytest.approx(torch.full((8,), 0.02), rel=0.2)
    assert torch.equal(*(weights["model.layers.0.mlp.up_proj.weight"] for weights in noisy))
    assert torch.equal(noisy[0]["model.norm.weight"], torch.ones(4))
    assert (tmp_path / "one" / "config.json").is_file()


@pytest.mark.parametrize("name", list(quantization.OWN))
def test_dsparks_own_runs_use_flags_that_there_are(name: str) -> None:
    known = {field.name.replace("_", "-") for field in fields(QuantizeOptions)}
    flags = [text.removeprefix("--") for text in quantization.OWN[name] if text.startswith("--")]
    assert {flag.removeprefix("no-") for flag in flags} <= known


def test_every_peer_has_a_runner_and_an_environment() -> None:
    setup = (ROOT / "benchmarks" / "peers" / "setup.sh").read_text()
    for environment, runner, _ in quantization.PEERS.values():
        assert (ROOT / "benchmarks" / "peers" / runner).is_file()
        assert f"setup_{environment}()" in setup


def test_methods_meet_their_like() -> None:
    ours = {quantization.method_of(name) for name in quantization.OWN}
    assert {quantization.method_of(name) for name in quantization.PEERS} <= ours
    assert quantization.method_of("gptqmodel-gptq-plain") == quantization.method_of("dspark-gptq") == "gptq"


def test_the_table_has_a_row_for_each_result_and_a_dash_for_what_is_not_known() -> None:
    row = {"ppl": 10.0, "ppl_increase_pct": 1.0, "ppl_increase_pct_se": 0.1, "kl": 0.01, "kl_se": 0.001, "agreement_pct": 95.0}
    cost = {"quantize_cpu_s": None, "process_cpu_s": 12.0, "peak_anon_bytes": 5e8}
    document = {
        "results": {"dspark-rtn": {**row, **cost}},
        "paired": {"a / b": {"ppl_pct": -1.0, "ppl_pct_se": 0.5, "kl_pct": -5, "kl_pct_se": 2}},
    }
    text = quantization.table(json.loads(json.dumps(document)))
    assert "| dspark-rtn | 10.000 | 1.00 ± 0.10 | 0.0100 ± 0.0010 | 95.00 | - | 12 | 500 |" in text
    assert "| a / b | -1.00 ± 0.50 | -5.0 ± 2.0 |" in text
