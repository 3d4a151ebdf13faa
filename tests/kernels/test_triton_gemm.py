"""The Triton products of 8-bit and 4-bit weights under Triton's interpreter against the reference, on edge shapes and on random ones.

The checks run in one subprocess (see tests/support/triton_gemm_checks.py), each is a test of its own here.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from interpreter_process import NEEDS_INTERPRETER, run_interpreted

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
from triton_gemm_checks import CHECKS

SCRIPT = Path(__file__).parents[1] / "support" / "triton_gemm_checks.py"
pytestmark = [pytest.mark.interpreter, NEEDS_INTERPRETER]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    return run_interpreted(SCRIPT)


@pytest.mark.parametrize("name", CHECKS)
def test_product_equals_reference(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["error"] is None, results[name]["error"]
