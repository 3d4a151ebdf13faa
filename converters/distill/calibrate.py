"""Sequential temperature scaling: what a drafter's confidence is divided by at each draft position, so that it is a probability.

Source: arXiv 2607.05147, section 3. From left to right the temperature of position k is searched for which the product of the estimates up
to k is closest to how often so many tokens were accepted; the ones before it stay. The error is the expected calibration error over 20
equal bins, as in the reference code; the grid is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

NUM_BINS = 20
GRID = tuple(2.0 ** (step / 8) for step in range(-24, 25))
"""49 values from 1/8 to 8, evenly in their logarithm, 1 among them."""
MIN_ROUNDS = 50
"""With fewer rounds that reach a position its temperature stays 1: the bins would be noise."""


def calibration_error(estimates: np.ndarray, outcomes: np.ndarray) -> float:
    """Mean distance between estimate and frequency, weighted by bin: estimates in [0, 1] and outcomes 0 or 1, both [n]."""
    if not len(estimates):
        return 0.0
    bins = np.minimum((estimates * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    gaps = np.bincount(bins, weights=estimates - outcomes, minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(estimates))


def fit_temperatures(survival: Sequence[Sequence[float]], accepted: Sequence[int], num_positions: int) -> tuple[float, ...]:
    """One temperature for each draft position. survival: the uncalibrated estimates of each round, at every position that was proposed;
    accepted: how many of them were accepted."""
    prefix = np.ones(len(survival))
    fitted: list[float] = []
    for k in range(num_positions):
        reached = np.array([len(row) > k for row in survival], bool)
        scores = np.array([_logit(row[k]) if len(row) > k else 0.0 for row in survival])
        outcomes = np.array([count > k for count in accepted], float)
        best = 1.0
        if reached.sum() >= MIN_ROUNDS:
            errors = {t: calibration_error((prefix * _sigmoid(scores / t))[reached], outcomes[reached]) for t in GRID}
            best = min(GRID, key=lambda t: (round(errors[t], 9), abs(math.log(t))))
        fitted.append(best)
        prefix = prefix * _sigmoid(scores / best)
    return tuple(fitted)


def errors_by_position(
    survival: Sequence[Sequence[float]], accepted: Sequence[int], temperatures: Sequence[float], num_positions: int
) -> list[float]:
    """Calibration error of the estimate that the first k tokens are all accepted, for k = 1 to num_positions."""
    found = []
    for k in range(num_positions):
        rounds = [i for i, row in enumerate(survival) if len(row) > k]
        scores = np.array([[_logit(value) for value in survival[i][: k + 1]] for i in rounds]).reshape(len(rounds), k + 1)
        divisors = np.array([temperatures[j] if j < len(temperatures) else 1.0 for j in range(k + 1)])
        estimates = _sigmoid(scores / divisors).prod(-1)
        found.append(calibration_error(estimates, np.array([accepted[i] > k for i in rounds], float)))
    return found


def _logit(value: float) -> float:
    value = min(max(value, 1e-7), 1 - 1e-7)
    return math.log(value / (1 - value))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))
