"""Every Triton kernel under Triton's interpreter against the reference, on edge shapes and random ones, in float32 and float16.

All checks run in one subprocess (see tests/support/triton_interpreter.py); each is a test of its own here.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from triton_interpreter import CHECKS, check_id

SCRIPT = Path(__file__).parents[1] / "support" / "triton_interpreter.py"
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """check id -> what the subprocess said about it."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return {row["id"]: row for row in rows}


@pytest.mark.parametrize("name", [check_id(case, dtype) for case, dtype in CHECKS])
def test_kernel_equals_reference(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["error"] is None, results[name]["error"]
