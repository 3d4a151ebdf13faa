"""benchmarks/roofline.py as it is typed: known shapes, an engine, measurements, and what it says of a mistake."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_runs import tiny_engine
from source_tree import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import roofline

from dspark.runtime.roofline import machine
from dspark.runtime.roofline.devices import DEVICES, Device
from dspark.runtime.roofline.ops import decode, step_ops, verify
from dspark.runtime.roofline.weights import ModelShape
from dspark.runtime.spec.manifest import load_manifest


def steps(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    assert roofline.main([*arguments, "--json", str(tmp_path / "found.json")]) == 0
    return json.loads((tmp_path / "found.json").read_text())["steps"]  # type: ignore[no-any-return]


def test_known_models_have_the_sizes_that_they_are_known_for(tmp_path: Path) -> None:
    """Parameters by their model cards: 8.03, 4.02 and 0.1345 milliards, two bytes each."""
    found = {row["model"]: row["weight_bytes"] / 2e9 for row in steps(tmp_path, "--batch", "1")}
    assert found == {
        "llama-3-8b": pytest.approx(8.03, rel=1e-3),
        "qwen3-4b": pytest.approx(4.02, rel=2e-3),
        "smollm2-135m": pytest.approx(0.1345, rel=1e-3),
    }


def test_a_step_is_that_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("llama-3-8b", "--device", "h100", "--mode", "verify", "--query", "4", "--context", "500", "--batch", "8", "--ops")
    (row,) = steps(tmp_path, *flags)
    ops = list(step_ops(ModelShape(roofline.MODELS["llama-3-8b"]), verify(8, 500, 4)))
    assert row["seconds"] == pytest.approx(DEVICES["h100"].total_seconds(ops)) and row["tokens"] == 32
    shown = capsys.readouterr().out
    assert "H100 SXM: 3350 GB/s" in shown and "gate_up_proj" in shown


def test_schemes_of_layers_and_head_are_told_apart(tmp_path: Path) -> None:
    dense, layers, both = (
        steps(tmp_path, "smollm2-135m", "--batch", "1", *more)[0]["ops"]
        for more in ([], ["--scheme", "w4a16"], ["--scheme", "w4a16", "--head-scheme", "w8a16"])
    )
    assert layers["down_proj"]["weight_bytes"] == 30 * (576 * 1536 // 2 + 576 * 1536 // 64 * 2)
    assert layers["head"] == dense["head"] and both["head"]["weight_bytes"] == 49152 * 576 + 49152 * 576 // 64 * 2


def test_an_engine_is_taken_as_it_is(tmp_path: Path) -> None:
    engine = tiny_engine(tmp_path, "llama", dtype="bfloat16", scheme="w8a8")
    (row,) = steps(tmp_path, str(engine), "--device", "l40s", "--batch", "2", "--context", "9")
    manifest = load_manifest(engine)
    ops = list(step_ops(ModelShape(manifest.model, manifest.quant), decode(2, 9)))
    assert row["seconds"] == pytest.approx(DEVICES["l40s"].total_seconds(ops)) and "w8a8" in row["scheme"]
    assert row["weight_bytes"] == manifest.weight_bytes()


def test_a_job_s_own_metrics_are_held_against_this_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a real run's file to a share of a limit that is made up."""
    from dspark_cli.app import run

    engine = tiny_engine(tmp_path)
    lines = [{"custom_id": str(i), "prompt": [7, 8, 9 + i], "max_tokens": 5, "ignore_eos": True} for i in range(4)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")]
    metrics = tmp_path / "metrics.json"
    assert run(["generate", *files, "--engine", str(engine), "--metrics", str(metrics), "--device", "cpu", "--quiet"]) == 0
    monkeypatch.setattr(machine, "measured_cpu", lambda *_: Device("made up", 1e12, {"float32": 1e12}))
    found = tmp_path / "found.json"
    assert roofline.main([str(engine), "--device", "cpu", "--measured", str(metrics), "--json", str(found)]) == 0
    (measured,) = json.loads(found.read_text())["measured"]
    assert 0 < measured["fraction"] == measured["limit_s"] / measured["seconds"] < 1
    assert measured["seconds"] == json.loads(metrics.read_text())["engine"]["forward_s"]
    assert "steps of" in capsys.readouterr().out


def test_timed_kernels_are_held_against_a_data_sheet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timing = {"op": "rms_norm", "rows": 1000, "size": 4800, "dtype": "bfloat16", "seconds": 8e-6}
    (tmp_path / "timed.json").write_text(json.dumps({"machine": {}, "timings": [timing]}))
    assert roofline.main(["--device", "h200", "--measured", str(tmp_path / "timed.json")]) == 0
    assert "50.0%  memory" in capsys.readouterr().out


def test_the_format_in_the_documents_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = (ROOT / "docs" / "roofline.md").read_text(encoding="utf-8").split("```json\n")[1].split("```")[0]
    (tmp_path / "timed.json").write_text(example)
    assert roofline.main(["--device", "h200", "--measured", str(tmp_path / "timed.json")]) == 0
    shown = capsys.readouterr().out
    assert "linear w4a16 64 x 4096 -> 28672" in shown and "paged_attention 64 x 1 in 1024" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-model"], "'no-such-model' is no directory and no known model"),
        (["llama-3-8b", "--tensor-parallel", "64"], "tensor_parallel is 64, allowed: from 1 to 32"),
        (["llama-3-8b", "--mode", "prefill", "--query", "9", "--context", "4"], "--query is 9, --context is 4"),
        (["--measured", "absent.json"], "'absent.json' cannot be read"),
        (["--measured", "list.json"], "'list.json' holds no JSON object"),
        (["--measured", "checks.json"], "the measurements have no 'timings'"),
        (["--measured", "job.json"], "is a job's metrics, and 0 models are given"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "checks.json").write_text('{"checks": []}')
    (tmp_path / "job.json").write_text('{"engine": {}}')
    assert roofline.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("roofline: ") and words in error and error.count("\n") == 1
