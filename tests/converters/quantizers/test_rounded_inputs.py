"""Weights for rounded inputs: against plain least squares over the tokens, and with GPTQ behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dspark.converters.quantizers.base import SolverOptions
from dspark.converters.quantizers.gptq import quantize_gptq
from dspark.converters.quantizers.rounded_inputs import rounded_inputs, rounded_tokens
from dspark.converters.quantizers.statistics import LayerStatistics, StatisticsAccumulator
from dspark.runtime.spec.quant import PRESETS, QuantScheme

W8A8 = PRESETS["w8a8"]
FP8 = replace(PRESETS["fp8"], inputs="dynamic")
STATIC = replace(PRESETS["fp8"], inputs="static")


def related_inputs(num_tokens: int = 900, outlier: float = 60.0) -> torch.Tensor:
    """48 channels made of 12, two of them with outliers in some tokens, so that all others of these are rounded coarsely."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, 12, generator=generator) @ torch.randn(12, 48, generator=generator)
    x = x + 0.3 * torch.randn(num_tokens, 48, generator=generator)
    x[::7, :2] *= outlier
    return x


def statistics_of(x: torch.Tensor) -> LayerStatistics:
    sums = StatisticsAccumulator(x.shape[1])
    sums.add(x)
    return sums.finish()


def weight_of(num_outputs: int = 32) -> torch.Tensor:
    return torch.randn(num_outputs, 48, generator=torch.Generator().manual_seed(1))


def error(values: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, rounded: torch.Tensor) -> float:
    return float((rounded @ values.t() - x @ weight.t()).double().square().sum(1).mean())


@pytest.mark.parametrize("scheme", [W8A8, FP8, STATIC], ids=lambda scheme: scheme.describe())
def test_the_best_weight_is_that_of_least_squares(scheme: QuantScheme) -> None:
    """Over all tokens, by the pseudo-inverse of the rounded ones. The rounding noise is not quite unrelated: a little is lost."""
    x, weight = related_inputs(), weight_of()
    statistics = statistics_of(x)
    assert statistics.tokens is not None and torch.equal(statistics.tokens, x)
    seen = rounded_inputs(statistics, scheme)
    assert seen is not None
    rounded = rounded_tokens(statistics, scheme)
    best = (torch.linalg.pinv(rounded.double()) @ (x @ weight.t()).double()).t().float()
    least, found = error(best, weight, x, rounded), error(seen.best_weight(weight), weight, x, rounded)
    assert least <= found < 1.25 * least
    assert found < (0.72 if scheme is W8A8 else 0.99) * error(weight, weight, x, rounded)  # float8's noise is in proportion: little to gain


@pytest.mark.parametrize("scheme", [W8A8, FP8], ids=lambda scheme: scheme.describe())
def test_the_noise_that_is_told_is_that_of_the_tokens(scheme: QuantScheme) -> None:
    x, weight = related_inputs(), weight_of()
    statistics = statistics_of(x)
    seen = rounded_inputs(statistics, scheme)
    assert seen is not None
    values = weight + 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    assert seen.output_noise(values, weight) / 2 == pytest.approx(error(values, weight, x, rounded_tokens(statistics, scheme)), rel=0.1)


@pytest.mark.parametrize("scheme", [W8A8, FP8], ids=lambda scheme: scheme.describe())
def test_gptq_for_rounded_inputs_loses_least_and_says_what(scheme: QuantScheme) -> None:
    x, weight = related_inputs(), weight_of()
    statistics = statistics_of(x)
    rounded = rounded_tokens(statistics, scheme)
    ours = quantize_gptq(weight, scheme, statistics)
    blind = quantize_gptq(weight, scheme, replace(statistics, tokens=None, factors={}))
    lost = {name: error(result.weight.dense(torch.float32), weight, x, rounded) for name, result in (("ours", ours), ("blind", blind))}
    if scheme is W8A8:
        assert lost["ours"] < 0.7 * lost["blind"]
    signal = float((x @ weight.t()).double().square().sum(1).mean())
    assert 10 ** (-ours.output_sqnr_db / 10) == pytest.approx(lost["ours"] / signal, rel=0.1)


def test_inputs_that_are_not_rounded_or_not_kept_change_nothing() -> None:
    statistics = statistics_of(related_inputs())
    assert rounded_inputs(statistics, PRESETS["w4a16"]) is None and rounded_inputs(statistics, PRESETS["fp8"]) is None
    assert rounded_inputs(replace(statistics, tokens=None), W8A8) is None
    assert rounded_inputs(replace(statistics, tokens=torch.zeros(0, 48)), W8A8) is None
    legacy = SolverOptions(legacy=True)
    seen, unseen = (quantize_gptq(weight_of(), W8A8, found, legacy) for found in (statistics, replace(statistics, tokens=None)))
    assert torch.equal(seen.weight.qweight, unseen.weight.qweight)


def test_few_tokens_say_nothing_of_the_best_weight() -> None:
    """Of 48 inputs with 100 tokens: directions that those happen not to point in must not lose their weights."""
    seen, weight = rounded_inputs(statistics_of(related_inputs()[:100]), W8A8), weight_of()
    assert seen is not None and seen.best_weight(weight) is weight


def test_linears_that_share_inputs_share_the_work() -> None:
    statistics = statistics_of(related_inputs())
    assert rounded_inputs(statistics, W8A8) is rounded_inputs(statistics, W8A8)
    assert rounded_inputs(statistics, FP8) is not rounded_inputs(statistics, W8A8)


def test_inputs_that_were_never_active_keep_their_weights() -> None:
    x = related_inputs()
    x[:, 5] = 0
    seen = rounded_inputs(statistics_of(x), W8A8)
    weight = weight_of()
    assert seen is not None and torch.allclose(seen.best_weight(weight)[:, 5], weight[:, 5], rtol=1e-4)
    assert bool(seen.best_weight(weight).isfinite().all())
