"""The tuner on real kernels of tiny shapes, under Triton's interpreter with a clock that says what a test tells it.

The checks run in one subprocess (see tests/support/tuning_checks.py), each is a test of its own here.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from interpreter_process import NEEDS_INTERPRETER, run_interpreted

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
from tuning_checks import CHECKS

SCRIPT = Path(__file__).parents[1] / "support" / "tuning_checks.py"
pytestmark = [pytest.mark.interpreter, NEEDS_INTERPRETER]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    return run_interpreted(SCRIPT)


@pytest.mark.parametrize("name", CHECKS)
def test_tuning_real_kernels(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["error"] is None, results[name]["error"]
