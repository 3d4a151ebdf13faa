"""The Triton products of 8-bit and 4-bit weights under Triton's interpreter against the reference, on edge shapes and on random ones.

The checks run in one subprocess (see tests/support/triton_gemm_checks.py), each is a test of its own here.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_triton_interpreter import pytestmark as pytestmark

SCRIPT = Path(__file__).parents[1] / "support" / "triton_gemm_checks.py"
if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
from triton_gemm_checks import CHECKS  # noqa: E402


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return {row["id"]: row for row in rows}


@pytest.mark.parametrize("name", CHECKS)
def test_product_equals_reference(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["error"] is None, results[name]["error"]
