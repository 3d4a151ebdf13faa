"""`dspark eval` as a user types it: figures, limits, one line per error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engine_runs import tiny_engine
from tiny_models import CORPUS, build_tokenizer, save_tokenizer

from dspark.converters.pipeline import convert
from dspark_cli.app import run


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoint, engine (dense) and engine-w4a16."""
    folder = tmp_path_factory.mktemp("models")
    tiny_engine(folder, scheme="w4a16")
    return folder


@pytest.fixture
def here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a text and a job file; names in the tests are relative to it."""
    (tmp_path / "text.txt").write_text(" ".join(CORPUS * 4))
    lines = [{"messages": [{"role": "user", "content": text}]} for text in CORPUS]
    (tmp_path / "job.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("checkpoint", "engine", "engine-w4a16"):
        (tmp_path / name).symlink_to(models / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run(["eval", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


BOTH = ("engine-w4a16", "--baseline", "engine", "--text", "text.txt", "--context-length", "32")


@pytest.mark.parametrize("left", [0, 13])
def test_perplexity_alone(here: Path, capsys: pytest.CaptureFixture[str], left: int) -> None:
    """What is behind the last whole window is said, and nothing where there is none."""
    tokenizer = build_tokenizer()
    words = (here / "text.txt").read_text().split(" ")
    ends = (" ".join(words[:count]) for count in range(len(words), 0, -1))
    text, count = next((text, n) for text in ends if (n := len(tokenizer.encode(text, add_special_tokens=False).ids)) % 32 == left)
    (here / "text.txt").write_text(text)
    code, out, err = typed(capsys, "engine", "--text", "text.txt", "--context-length", "32")
    note = [f"note         {left} tokens behind the last whole window are not used"] if left else []
    windows = f"text         text.txt: {count // 32} windows of 32 tokens, {count // 32 * 31} tokens scored"
    assert code == 0 and out.splitlines()[:-1] == [windows, *note]
    assert out.splitlines()[-1].startswith("perplexity   ") and "baseline" not in out
    assert "measured in" in err.splitlines()[-1]


def test_a_comparison_as_a_document(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = typed(capsys, *BOTH, "--prompts", "job.jsonl", "--json", "--quiet")
    document = json.loads(out)
    assert code == 0 and err == "" and document["passed"] is None and document["scheme"] == "w4a16 group 32"
    text, prompts = document["evaluations"]
    assert (text["kind"], text["context_length"], prompts["kind"], prompts["samples"]) == ("text", 32, "prompts", len(CORPUS))
    for record in (text, prompts):
        assert 0.001 < record["mean_kl"] < record["p99_kl"] <= record["max_kl"] and 0 < record["top1_agreement"] < 1
        assert record["baseline"] == "engine" and "limits" not in record
    assert set(document["layers"]) and all(entry["bytes"] for entry in document["layers"].values())


def test_an_engine_is_equal_to_itself_and_to_its_checkpoint(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The baseline may be a checkpoint: what a quantization started from need not be converted to be compared with."""
    for baseline in ("engine", "checkpoint"):
        code, out, _ = typed(capsys, "engine", "--baseline", baseline, *BOTH[3:], "--max-kl", "0", "--max-ppl-increase", "0", "--json")
        record = json.loads(out)["evaluations"][0]
        assert code == 0 and record["mean_kl"] == record["max_kl"] == record["ppl_increase_pct"] == 0.0 and record["top1_agreement"] == 1.0
        assert json.loads(out)["passed"] is True and record["passed"] is True


def test_a_broken_limit_exits_6_after_the_figures(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = typed(capsys, *BOTH, "--max-kl", "1e-6", "--report", "r.html")
    last = err.splitlines()[-1]
    assert code == 6 and "mean KL" in out
    assert (
        last.startswith("error: quality gate: mean KL to the baseline is ")
        and "--max-kl is 1e-06; largest error of weights: model.layers." in last
    )
    assert "quantize again with: --scheme w8a16" in last and "nothing was published" not in last
    assert "--max-kl is 1e-06" in (here / "r.html").read_text()
    code, out, _ = typed(capsys, *BOTH, "--max-ppl-increase", "1e9", "--json")
    assert code == 0 and json.loads(out)["evaluations"][0]["passed"] is True


def test_the_report_and_the_table_of_layers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = typed(capsys, *BOTH, "--report", "r.html", "--verbose")
    table = [line for line in out.splitlines() if line.startswith("model.layers.")]
    assert code == 0 and len(table) == 14 and all("dB" in line for line in table)
    document = (here / "r.html").read_text()
    assert document.startswith("<!DOCTYPE html>") and "<h1>engine-w4a16</h1>" in document and document.count("<svg") == 1
    assert "2 layers in float32 on cpu" in err


def test_the_dtype_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run in 16 bits has a distance of its own."""
    _, out, _ = typed(capsys, "engine", "--baseline", "engine", *BOTH[3:], "--dtype", "bfloat16", "--json")
    record = json.loads(out)["evaluations"][0]
    assert record["dtype"] == record["baseline_dtype"] == "bfloat16" and record["mean_kl"] == 0.0


def test_the_bound_on_tokens(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = typed(capsys, "engine", "--text", "text.txt", "--context-length", "32", "--max-eval-tokens", "70", "--json")
    assert json.loads(out)["evaluations"][0]["tokens"] == 2 * 31


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["engine"], "nothing to measure on is given; type --text FILE or --prompts FILE.jsonl"),
        (["engine", "--text", "text.txt", "--max-kl", "0.1"], "need a baseline; add --baseline DIR"),
        (["engine", "--text", "nosuch.txt"], "'nosuch.txt' cannot be read (No such file or directory)"),
        (["engine", "--text", "."], "'.' is a directory"),
        (["engine", "--text", "text.txt", "--context-length", "257"], "--context-length is 257, the model's context is 256"),
        (["engine", "--text", "text.txt", "--context-length", "1"], "--context-length is 1, allowed: from 2"),
        (["engine", "--text", "text.txt", "--max-eval-tokens", "100"], "at most 100 tokens are wanted, one window has 256"),
        (["engine", "--prompts", "text.txt"], "no line of 'text.txt' can be used (line 1: "),
        (["engine", "--text", "text.txt", "--report", "no/r.html"], "mkdir -p"),
        (["engine", "--text", "text.txt", "--report", "text.txt"], "--report is 'text.txt', which is what is measured on"),
        (["checkpoint", "--text", "text.txt"], "so it is no engine"),
        (["engine", "--baseline", "job.jsonl", "--text", "text.txt"], "no checkpoint that dspark knows"),
        (["engine", "--text", "text.txt", "--max-kl", "-1"], "--max-kl is -1.0, allowed: from 0"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    code, out, err = typed(capsys, *arguments)
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and words in err, err
    assert not (here / "r.html").exists()


def test_another_tokenizer_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same ids would be other text to the baseline: the KL would be a number without meaning."""
    tokenizer = json.loads(build_tokenizer().to_str())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["e"] = vocab["e"], vocab["a"]
    convert(here / "checkpoint", here / "other", audit=False)
    from tokenizers import Tokenizer

    save_tokenizer(here / "other", Tokenizer.from_str(json.dumps(tokenizer)))
    code, _, err = typed(capsys, "engine", "--baseline", "other", "--text", "text.txt", "--context-length", "32")
    assert code == 2 and "to the engine and" in err and "compare engines of the same model" in err


def test_help_imports_no_torch() -> None:
    code = "import sys; from dspark_cli.app import run; run(['eval', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--max-kl" in done.stdout
