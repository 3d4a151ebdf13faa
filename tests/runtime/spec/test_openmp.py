"""OpenMP's waiting is bounded, and the user's own word stands."""

import os

import pytest

from dspark.runtime.spec.openmp import SPIN_COUNT, bound_spinning


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, SPIN_COUNT), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, None)],
)
def test_spinning_is_bounded_unless_the_user_said_otherwise(monkeypatch: pytest.MonkeyPatch, given: dict, expected: str | None) -> None:
    """The default spins for milliseconds at every barrier: beside another job a run slows down by a factor."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    bound_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == expected
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
