"""`dspark tune` where there is no GPU, and what it and `generate --autotune` say."""

import json
from pathlib import Path

import pytest
import torch
from engine_runs import tiny_engine

from dspark.kernels.triton.gemm_tiles import GemmTile
from dspark.kernels.triton.tuning.choices import Tuned
from dspark_cli.app import run
from dspark_cli.tune import last_line, line_of, problems_of

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("engine"))


@NO_GPU
def test_without_a_gpu_it_says_so_in_one_line(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", str(engine)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "tune measures kernels on a GPU, and this machine has no usable one; run it where the engine will run" in said.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seconds", "0"], "--seconds is 0.0, allowed: from 1"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0, allowed: from 1 to 4096"),
        (["--block-size", "7"], "--block-size is 7, allowed: 8, 16, 32, 64"),
        (["--max-num-seqs", "100", "--max-num-batched-tokens", "50"], "--max-num-batched-tokens is 50, below --max-num-seqs 100"),
    ],
)
def test_wrong_values_are_named(flags: list[str], said: str, engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", str(engine), *flags]) == 2
    assert said in capsys.readouterr().err


def test_what_is_no_engine_is_named_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@NO_GPU
def test_generate_says_why_nothing_is_tuned_here(engine: Path, tmp_path: Path) -> None:
    """A flag that cannot do anything is neither an error, since one script serves several machines, nor silent."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "a b"}\n')
    command = ["generate", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--engine", str(engine), "--max-tokens", "2"]
    assert run([*command, "--autotune", "5", "--metrics", str(tmp_path / "metrics.json")]) == 0
    tiles = json.loads((tmp_path / "metrics.json").read_text())["engine"]["tiles"]
    assert tiles == {"autotune": {"off": "tiles are those of GPU kernels, the device is cpu"}}


def test_a_shape_is_one_line() -> None:
    tile = GemmTile(16, 128, 64, 4, 6, splits=8)
    faster = line_of("wna16 rows 1", Tuned(tile, 1e-5, 1.5e-5, 20, {}))
    assert faster == "wna16 rows 1:     15.0 ->     10.0 us (1.50x)  16 x 128 x 64, 4 warps, 6 stages, 8 splits"
    assert "as it was" in line_of("key", Tuned(tile, 1e-5, 1e-5, 20, {}))


def test_the_end_tells_what_is_left_and_what_went_wrong() -> None:
    outcome = {"measured": 3, "faster": 2, "known": 1, "left": 4, "seconds": 60.2, "failed": {"a": "MemoryError"}, "stopped": None}
    report = {"autotune": {**outcome, "cache_problem": "is not written"}, "cache": "tiles.json"}
    assert (
        last_line(report)
        == "tune: 3 shapes measured, 2 of them faster than before, 1 known before, 4 left: the same command goes on; 60 s; 'tiles.json'"
    )
    assert problems_of(report["autotune"]) == ["a is not measured: MemoryError", "is not written"]
    assert problems_of({"off": "why"}) == ["nothing was measured: why"]
