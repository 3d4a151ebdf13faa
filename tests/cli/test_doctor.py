"""`dspark doctor` says which kernel each op takes and why the others declined."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from interpreter_process import NEEDS_INTERPRETER

from dspark.kernels.dispatch import OPS
from dspark_cli.app import run


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


def test_the_interpreter_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--interpreter", "--device", "cuda"]) == 2
    assert "--interpreter asks about the CPU, --device is cuda" in capsys.readouterr().err
