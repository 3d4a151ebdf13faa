"""Temperatures that make the confidences probabilities, on rounds whose true chances are known."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.converters.distill.calibrate import calibration_error, errors_by_position, fit_temperatures


def rounds(temperatures: list[float], count: int = 4000, seed: int = 0) -> tuple[list[list[float]], list[int]]:
    """Estimates that are off by a temperature at each position, and outcomes of the true chances."""
    generator = np.random.default_rng(seed)
    scores = generator.normal(1.0, 1.5, (count, len(temperatures)))
    chances = 1 / (1 + np.exp(-scores))
    kept = (generator.random(scores.shape) < chances).cumprod(-1).sum(-1)
    told = 1 / (1 + np.exp(-scores * np.array(temperatures)))
    return told.tolist(), kept.tolist()


def test_the_error_by_hand() -> None:
    """Two bins: 0.9 is told twice and right once, 0.1 once and wrong."""
    estimates, outcomes = np.array([0.92, 0.92, 0.12]), np.array([1.0, 0.0, 0.0])
    assert calibration_error(estimates, outcomes) == pytest.approx((0.84 + 0.12) / 3)
    assert calibration_error(np.array([1.0]), np.array([1.0])) == 0.0
    assert calibration_error(np.array([]), np.array([])) == 0.0


def test_scaling_finds_how_far_the_estimates_are_off() -> None:
    off = [3.0, 0.5, 2.0]
    survival, accepted = rounds(off)
    fitted = fit_temperatures(survival, accepted, 3)
    assert fitted == pytest.approx(off, rel=0.3)
    fresh, outcomes = rounds(off, seed=1)
    plain, scaled = errors_by_position(fresh, outcomes, (), 3), errors_by_position(fresh, outcomes, fitted, 3)
    assert all(after < 0.4 * before for before, after in zip(plain, scaled, strict=True))


def test_right_estimates_are_left_alone() -> None:
    survival, accepted = rounds([1.0, 1.0])
    assert fit_temperatures(survival, accepted, 2) == pytest.approx((1.0, 1.0), rel=0.15)


def test_a_position_that_few_rounds_reach_keeps_its_estimates() -> None:
    survival, accepted = rounds([3.0, 3.0], 200)
    shorter = [row if index < 20 else row[:1] for index, row in enumerate(survival)]
    fitted = fit_temperatures(shorter, [min(a, len(row)) for a, row in zip(accepted, shorter, strict=True)], 2)
    assert fitted[0] > 1.5 and fitted[1] == 1.0
