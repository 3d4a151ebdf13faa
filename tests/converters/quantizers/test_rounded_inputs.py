"""The outputs' error of linears that round their inputs: token by token in plain loops, and where there is nothing to add."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.converters.quantizers.base import DEFAULTS, quantizer
from dspark.converters.quantizers.statistics import LayerStatistics, StatisticsAccumulator
from dspark.runtime.spec.quant import PRESETS, QuantScheme

W8A8 = PRESETS["w8a8"]
FP8 = replace(PRESETS["fp8"], inputs="dynamic")
STATIC = replace(PRESETS["fp8"], inputs="static")


def inputs() -> torch.Tensor:
    """One channel with outliers in some tokens, so that all others of these are rounded coarsely to 8 bits."""
    x = torch.randn(200, 48, generator=torch.Generator().manual_seed(0))
    x[::7, 0] *= 40
    return x


def statistics_of(x: torch.Tensor) -> LayerStatistics:
    sums = StatisticsAccumulator(x.shape[1])
    sums.add(x)
    return sums.finish()


def slow_rounding(token: list[float], scheme: QuantScheme, largest: float) -> list[float]:
    """One token by its own step, or by that of the largest value of all."""
    if scheme.storage == "int8":
        values = np.array(token, np.float32)  # in float64 the largest value, on the edge between -127 and -128, may fall to the other side
        largest_here = np.abs(values).max()
        return [min(127.0, float(np.round(value * (np.float32(127.5) / largest_here)))) * float(largest_here) / 127.5 for value in values]
    scale = (largest if scheme.inputs == "static" else max(map(abs, token))) / 448
    return [float(torch.tensor(value / scale).to(torch.float8_e4m3fn)) * scale for value in token]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("scheme", [W8A8, FP8, STATIC], ids=lambda scheme: scheme.describe())
def test_the_error_is_that_of_the_tokens(scheme: QuantScheme, method: str) -> None:
    x, weight = inputs(), torch.randn(8, 48, generator=torch.Generator().manual_seed(1))
    result = quantizer(method)(weight, scheme, statistics_of(x), DEFAULTS)
    rows, stored, largest = x.tolist(), result.weight.dense(torch.float64), float(x.abs().max())
    signal = noise = 0.0
    for token in rows:
        wanted = weight.double() @ torch.tensor(token, dtype=torch.float64)
        got = stored @ torch.tensor(slow_rounding(token, scheme, largest), dtype=torch.float64)
        signal, noise = signal + float(wanted.square().sum()), noise + float((got - wanted).square().sum())
    assert result.output_sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=0.05)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_inputs_that_are_not_rounded_or_not_kept_add_nothing(method: str) -> None:
    statistics, weight = statistics_of(inputs()), torch.randn(8, 48, generator=torch.Generator().manual_seed(1))
    bare = replace(statistics, tokens=None)
    for scheme in (PRESETS["w8a16"], PRESETS["fp8"]):
        results = [quantizer(method)(weight, scheme, found, DEFAULTS) for found in (statistics, bare)]
        assert results[0].output_sqnr_db == results[1].output_sqnr_db
    with_inputs, without = (quantizer(method)(weight, W8A8, found, DEFAULTS) for found in (statistics, bare))
    assert torch.equal(with_inputs.weight.qweight, without.weight.qweight)
    assert with_inputs.output_sqnr_db < without.output_sqnr_db - 3
