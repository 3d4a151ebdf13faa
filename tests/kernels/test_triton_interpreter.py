"""Every Triton kernel under Triton's interpreter against the reference, on edge shapes and random ones, in float32 and float16; then
tiny models through the whole engine with `kernels="triton"`: the reference's tokens.

The kernel checks run in one subprocess (see tests/support/triton_interpreter.py), each is a test of its own here.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from triton_interpreter import ENGINE_CHECKS, KERNEL_CHECKS, check_id

SCRIPT = Path(__file__).parents[1] / "support" / "triton_interpreter.py"


def triton_version() -> tuple[int, int]:
    """(major, minor) of the installed triton, without importing it."""
    if find_spec("triton") is None:
        return 0, 0
    major, minor = version("triton").split(".")[:2]
    return int(major), int(minor)


pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(triton_version() < (3, 7), reason="the interpreter of triton 3.6 does not work with the numpy of today"),
]


def run_script(*names: str) -> dict[str, dict[str, Any]]:
    """check id -> what the subprocess said about it."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run([sys.executable, str(SCRIPT), *names], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return {row["id"]: row for row in rows}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    return run_script("kernels")


@pytest.mark.parametrize("name", [check_id(case, dtype) for case, dtype in KERNEL_CHECKS])
def test_kernel_equals_reference(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["error"] is None, results[name]["error"]


@pytest.mark.parametrize(
    "name", [name if name == "engine-llama-w4a16" else pytest.param(name, marks=pytest.mark.slow) for name in ENGINE_CHECKS]
)
def test_engine_gives_the_reference_tokens(name: str) -> None:
    result = run_script(name)[name]
    assert result["error"] is None, result["error"]
