"""Drawing tokens where the logits are, under Triton's interpreter: the host's loops and the slow clear forms say what is right."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from interpreter_process import NEEDS_INTERPRETER, run_interpreted

SUPPORT = Path(__file__).parents[1] / "support"
FAST = ("option_columns", "best-float32", "noise", "edits", "positions", "draws-plain-7", "draws-tied-3001", "sampler", "rejection")
"""The rest is slow: other kinds of logits, large vocabularies, the law of rejection."""


def parameters() -> list[Any]:
    if find_spec("triton") is None:
        return list(FAST)
    from triton_sampling import CHECKS

    assert set(FAST) <= set(CHECKS)
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CHECKS]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    names = [item.callspec.params["name"] for item in request.session.items if item.fspath == request.fspath and hasattr(item, "callspec")]
    return run_interpreted(SUPPORT / "triton_sampling.py", *dict.fromkeys(names))


@NEEDS_INTERPRETER
@pytest.mark.interpreter
@pytest.mark.parametrize("name", parameters())
def test_drawing_on_the_device(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["error"] is None, results[name]["error"]
