"""Every Triton kernel under Triton's interpreter against the reference, on edge shapes and random ones, in float32 and float16; then
tiny models through the whole engine with `kernels="triton"`: the reference's tokens.

The kernel checks run in one subprocess (see tests/support/triton_interpreter.py), each is a test of its own here.
"""

from pathlib import Path
from typing import Any

import pytest
from interpreter_process import NEEDS_INTERPRETER, run_interpreted
from triton_interpreter import ENGINE_CHECKS, KERNEL_CHECKS, check_id

SCRIPT = Path(__file__).parents[1] / "support" / "triton_interpreter.py"
pytestmark = [pytest.mark.interpreter, NEEDS_INTERPRETER]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    return run_interpreted(SCRIPT, "kernels")


@pytest.mark.parametrize("name", [check_id(case, dtype) for case, dtype in KERNEL_CHECKS])
def test_kernel_equals_reference(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["error"] is None, results[name]["error"]


@pytest.mark.parametrize(
    "name", [name if name == "engine-llama-w4a16" else pytest.param(name, marks=pytest.mark.slow) for name in ENGINE_CHECKS]
)
def test_engine_gives_the_reference_tokens(name: str) -> None:
    result = run_interpreted(SCRIPT, name)[name]
    assert result["error"] is None, result["error"]
