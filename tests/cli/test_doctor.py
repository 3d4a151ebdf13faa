"""`dspark doctor` says which kernel each op takes and why the others declined."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter_process import NEEDS_INTERPRETER

from dspark.kernels.dispatch import OPS
from dspark.kernels.triton.tuning import machine
from dspark.kernels.triton.tuning.limits import CARDS, DeviceLimits
from dspark_cli.app import run
from dspark_cli.doctor import tile_facts, tile_line


def asked(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["doctor", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)["kernels"]


def test_every_op_has_a_taker_and_every_other_candidate_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    choices = asked(capsys, "--device", "cpu")
    assert set(choices) == set(OPS)
    for op, choice in choices.items():
        assert choice["taken"] in ("cpu", "reference"), op
        assert choice["declined"]["triton"] in ("needs a GPU, the device is cpu", "has no such kernel"), op


@NEEDS_INTERPRETER
@pytest.mark.interpreter
def test_under_the_interpreter_triton_takes_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own: triton reads its variable when it is imported."""
    command = [sys.executable, "-c", "from dspark_cli.app import main; main()", "doctor", "--interpreter", "--dtype", "float32", "--json"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    choices = json.loads(done.stdout)["kernels"]
    assert choices["rms_norm"] == {"taken": "triton", "declined": {}}
    assert choices["paged_attention"]["taken"] == choices["make_wna16_linear"]["taken"] == "triton"
    assert choices["moe_mlp"]["declined"]["triton"] == "has no such kernel"
    without = asked(capsys, "--interpreter", "--dtype", "float32")
    assert "TRITON_INTERPRET" in without["rms_norm"]["declined"]["triton"]


def test_tiles_have_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which table a GPU has, that nobody has measured it, and where what is measured is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for card, table in (("h200", "table of H100, H200, unmeasured"), ("a100", "table of A100, unmeasured")):
        monkeypatch.setattr(machine, "this_gpu", lambda card=card: CARDS[card])
        facts = tile_facts(True)
        assert tile_line(facts, True) == f"tiles {table}; 0 shapes measured here, '{facts['cache']}'"
    monkeypatch.setattr(machine, "this_gpu", lambda: DeviceLimits("NVIDIA A10", (8, 6), 72, 6 << 20))
    assert tile_line(tile_facts(True), True).startswith("tiles by shape alone, no table for this GPU; 0 shapes")
    assert run(["doctor", "--device", "cpu"]) == 0
    assert f"tiles none without a GPU; measured ones would be kept in '{tmp_path}" in capsys.readouterr().out or torch.cuda.is_available()


def test_the_interpreter_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--interpreter", "--device", "cuda"]) == 2
    assert "--interpreter asks about the CPU, --device is cuda" in capsys.readouterr().err
