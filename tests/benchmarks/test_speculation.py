"""`benchmarks/cpu.py --speculation`: the arithmetic of its ratios, and a whole run on a tiny engine with a draft."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_runs import tiny_engine
from source_tree import ROOT
from tiny_models import PROMPTS

sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "workloads"), str(ROOT / "benchmarks" / "peers")]

import cpu  # noqa: E402
import speculation  # noqa: E402

from dspark.runtime.speculation.pairing import Machine, Pairing  # noqa: E402


def test_a_ratio_is_taken_within_its_round_and_bounded_from_below() -> None:
    """A machine twice as slow in one round moves neither the ratio nor its bound."""
    ratio, lower = speculation.paired_ratio([100.0, 50.0, 80.0], [150.0, 75.0, 120.0])
    assert ratio == pytest.approx(1.5) and lower == pytest.approx(1.5)
    ratio, lower = speculation.paired_ratio([1.0, 1.0], [1.0, 2.0])
    assert ratio == pytest.approx(math.sqrt(2))
    assert lower == pytest.approx(math.exp(math.log(2) / 2 - 6.314 * (math.log(2) / math.sqrt(2)) / math.sqrt(2)))  # t by hand
    assert speculation.paired_ratio([2.0], [3.0]) == (pytest.approx(1.5), None)
    many = speculation.paired_ratio([1.0] * 40, [1.0, 1.1] * 20)
    assert many[1] is not None and many[1] < many[0] < 1.1


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a draft of its own, the target itself, and a pairing that says n-grams before it."""
    folder = tmp_path_factory.mktemp("engine")
    made = tiny_engine(folder)
    shutil.copytree(made, folder / "draft")
    shutil.move(folder / "draft", made / "draft")
    pairing = Pairing("ngram+draft-model", "draft", Machine("another one", "cpu", 1, "float32"))
    (made / "pairing.json").write_bytes(pairing.to_bytes())
    return made


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lines") / "river.jsonl"
    lines = [{"custom_id": str(i), "prompt": prompt, "max_tokens": 12, "temperature": 0} for i, prompt in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_every_cell_is_measured_and_written(
    engine: Path, workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "result.json"
    arguments = ["cpu.py", "--speculation", "--engine", str(engine), "--workload", str(workload), "--batch", "1,4", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--lines-at-one", "2", "--out", str(out)])
    cpu.main()
    document = json.loads(out.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = document["rows"]
    assert {(row["batch"], row["ends"]) for row in rows} == {(1, "eos"), (1, "ignore_eos"), (4, "eos"), (4, "ignore_eos")}
    methods = [row["method"] for row in rows if row["batch"] == 1 and row["ends"] == "eos"]
    assert methods == ["off", "ngram", "auto", "draft"]  # ngram+draft is what auto is
    for row in rows:
        assert len(row["runs"]) == 2 and row["ratio"] > 0
        assert (row["behind_prompts_ratio"] is not None) == (row["batch"] == 1)
        assert all(run["behind_prompts_s"] is None or 0 < run["behind_prompts_s"] < run["wall_s"] for run in row["runs"])
        if row["method"] == "off":
            assert row["ratio"] == 1.0 and row["accepted_length"] is None
        if row["ends"] == "ignore_eos":
            assert row["tokens"] == 12 * (2 if row["batch"] == 1 else len(PROMPTS))
    tokens = {(row["batch"], row["ends"], row["tokens"]) for row in rows}
    assert len(tokens) == 4  # float32: no method changes a text
    drafts = [row["accepted_length"] for row in rows if row["method"] == "draft"]
    assert any(length is not None and length > 2 for length in drafts)  # the target drafts for itself
    printed = capsys.readouterr()
    assert printed.out.count("river") == len(rows)
    assert "ngram+draft: left out, it is auto" in printed.err


def test_an_engine_without_a_draft_is_measured_with_what_there_is(engine: Path, workload: Path, tmp_path: Path, capsys) -> None:
    bare = shutil.copytree(engine, tmp_path / "engine", ignore=shutil.ignore_patterns("draft", "pairing.json"))
    arguments = ["--engine", str(bare), "--workload", str(workload), "--batch", "4", "--rounds", "1", "--ends", "eos"]
    rows = speculation.main(arguments, lambda name, folder: folder / name, {})
    assert [row["method"] for row in rows] == ["off", "ngram"]
    error = capsys.readouterr().err
    assert "auto: left out, it is ngram" in error and "draft: left out, the engine has no draft" in error
    with pytest.raises(SystemExit):
        speculation.main([*arguments, "--methods", "magic"], lambda name, folder: folder / name, {})
