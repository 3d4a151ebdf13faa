"""The filters on distributions that can be worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from dspark.runtime.sampling.filters import probabilities, ranks, usable_temperature


def filtered(probs: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[float]:
    return probabilities(torch.tensor(probs).log(), temperature, top_k, top_p, min_p).tolist()


P = [0.1, 0.4, 0.2, 0.3]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, P),
        ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 4}, P),
        ({"top_k": 99}, P),
        ({"top_k": -1}, P),
        ({"top_p": 0.01}, [0, 1, 0, 0]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.41}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.69}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 0.95}, P),
        ({"min_p": 0.4}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        # top-p counts within what top-k left: 0.4/0.7 = 0.571
        ({"top_k": 2, "top_p": 0.57}, [0, 1, 0, 0]),
        ({"top_k": 2, "top_p": 0.58}, [0, 4 / 7, 0, 3 / 7]),
        # min-p looks at the most likely token, whatever was dropped before
        ({"top_k": 3, "min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71, "min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        # temperature comes first: at 0.5 the likeliest has 0.533
        ({"temperature": 0.5, "top_p": 0.52}, [0, 1, 0, 0]),
        ({"temperature": 0.5, "min_p": 0.5}, [0, 16 / 25, 0, 9 / 25]),
    ],
)
def test_each_option_keeps_what_the_definition_says(options: dict, expected: list[float]) -> None:
    assert filtered(P, **options) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 3}, [1 / 3, 1 / 3, 1 / 3, 0]),
        ({"top_p": 0.5}, [0.5, 0.5, 0, 0]),
        ({"top_p": 0.51}, [1 / 3, 1 / 3, 1 / 3, 0]),
        ({"min_p": 1.0}, [0.25] * 4),
    ],
)
def test_ties_at_a_cut_go_to_the_lower_id(options: dict, expected: list[float]) -> None:
    """Not to all tied tokens and not to any of them: the text would depend on the sort."""
    assert filtered([0.25] * 4, **options) == pytest.approx(expected, abs=1e-6)


def test_ranks_are_stable() -> None:
    assert ranks(torch.tensor([1.0, 2.0, 2.0, 0.5, 2.0])).tolist() == [1, 2, 4, 0, 3]


def test_forbidden_tokens_stay_at_zero() -> None:
    row = torch.tensor([0.0, -math.inf, 0.0, -math.inf])
    for options in ((1.0, 0, 1.0, 0.0), (0.3, 3, 0.99, 0.1), (1e-40, 0, 1.0, 0.0), (1e300, 0, 1.0, 0.0)):
        assert probabilities(row, *options).tolist() == [0.5, 0.0, 0.5, 0.0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-30, 1e30, 1e300])
def test_extreme_temperatures_give_a_distribution(temperature: float) -> None:
    """float32 knows neither 1e-46 nor 1e39: 0 times infinity is NaN, and a NaN distribution has no tokens."""
    assert 0 < usable_temperature(temperature) < math.inf
    probs = probabilities(torch.tensor([1.0, 3.0, 2.0]), temperature, 0, 1.0, 0.0).tolist()
    assert probs == pytest.approx([0, 1, 0] if temperature < 1 else [1 / 3] * 3)
