"""SmoothQuant: the formula by hand and in plain loops, and the choice of alpha by what 8 bits on both sides lose."""

from __future__ import annotations

import pytest
import torch

from dspark.converters.quantizers.smoothquant import ALPHAS, scales_for, smooth_scales
from dspark.converters.quantizers.statistics import LayerStatistics, StatisticsAccumulator


def statistics_of(x: torch.Tensor) -> LayerStatistics:
    sums = StatisticsAccumulator(x.shape[1])
    sums.add(x)
    return sums.finish()


def inputs(outliers: float, seed: int = 0) -> torch.Tensor:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(seed))
    x[:, ::16] *= outliers
    return x


def weights(seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, 64, generator=generator) * 0.1 for count in (32, 16)]


def slow_scales(x: torch.Tensor, ws: list[torch.Tensor], alpha: float) -> list[float]:
    scales = []
    for k in range(x.shape[1]):
        w = max(max(float(value) for value in weight[:, k].abs()) for weight in ws)
        scales.append(max(float(x[:, k].abs().max()) ** alpha / max(w, 1e-5) ** (1 - alpha), 1e-5))
    return scales


def slow_error(x: torch.Tensor, ws: list[torch.Tensor], scales: torch.Tensor) -> float:
    """Squared error of the outputs with tokens and outputs' weights each rounded to 8 bits by their own step."""

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        step = rows.abs().amax(1, keepdim=True) / 127.5
        return torch.round(rows / step).clamp(-128, 127) * step

    return sum(float((rounded(x / scales) @ rounded(w * scales).t() - x @ w.t()).square().sum()) for w in ws)


def test_formula_by_hand() -> None:
    """Largest |x| 16 and 1, largest |w| 1 and 1: at 0.5 the scales are 4 and 1, which makes 4 and 1 of both sides."""
    observed = statistics_of(torch.tensor([[16.0, 1.0], [-3.0, 0.5]]))
    scales, alpha = smooth_scales(observed, [torch.tensor([[1.0, -1.0], [0.5, 0.25]])], 0.5)
    assert scales.tolist() == [4, 1] and alpha == 0.5
    assert (observed.max_abs / scales).tolist() == [4, 1]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.85, 1.0])
def test_scales_equal_the_plain_loops(alpha: float) -> None:
    x, ws = inputs(30), weights()
    scales, used = smooth_scales(statistics_of(x), ws, alpha)
    assert used == alpha and scales.tolist() == pytest.approx(slow_scales(x, ws, alpha), rel=1e-5)


@pytest.mark.parametrize("outliers", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("tails", [1, 2])
def test_the_alpha_that_is_chosen_loses_little_more_than_the_best(outliers: float, tails: int) -> None:
    """By the error of all outputs over all tokens: from even channels of few values to heavy tails with outliers."""
    x, ws = inputs(outliers), weights()
    x = x.sign() * x.abs() ** tails
    observed = statistics_of(x)
    scales, alpha = smooth_scales(observed, ws)
    errors = {tried: slow_error(x, ws, smooth_scales(observed, ws, tried)[0]) for tried in ALPHAS}
    assert errors[alpha] <= 1.1 * min(errors.values())
    assert slow_error(x, ws, scales) == errors[alpha]


def test_smoothing_pays_where_there_are_outliers() -> None:
    x, ws = inputs(100), weights()
    scales, _ = smooth_scales(statistics_of(x), ws)
    assert slow_error(x, ws, scales) < 0.2 * slow_error(x, ws, torch.ones(64))


def test_a_dead_channel_takes_the_middle_scale() -> None:
    """By the formula it would get 1e-5, and its first activation would outgrow all others a thousandfold."""
    scales = scales_for(torch.tensor([4.0, 0.0, 9.0, 1.0]), torch.ones(4), 0.5)
    assert scales.tolist() == [2, 2, 3, 1]
    assert scales_for(torch.zeros(3), torch.ones(3), 0.5).tolist() == [1, 1, 1]
    assert smooth_scales(statistics_of(torch.zeros(4, 64)), weights())[0].tolist() == [1] * 64


def test_weights_of_zeros_give_finite_scales() -> None:
    scales = scales_for(torch.tensor([4.0, 1.0]), torch.tensor([0.0, 1.0]), 0.5)
    assert bool(scales.isfinite().all()) and bool((scales > 0).all())


def test_nothing_that_is_given_changes() -> None:
    x, ws = inputs(30), weights()
    observed = statistics_of(x)
    before = [tensor.clone() for tensor in (x, *ws, observed.max_abs)]
    smooth_scales(observed, ws)
    assert all(torch.equal(old, new) for old, new in zip(before, (x, *ws, observed.max_abs), strict=True))
