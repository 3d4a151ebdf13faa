"""What a linear loses whose inputs are rounded too when it runs: measured on the tokens that the statistics keep.

The weights that suit rounded inputs best (by least squares) are other ones, shrunk where an input is little more than its noise. Codes for
those made the 8-bit schemes no better (docs/benchmarks.md), so this only measures. K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dspark.converters.quantizers.base import QuantizedWeight
from dspark.converters.quantizers.measure import decibels, energy
from dspark.converters.quantizers.statistics import LayerStatistics
from dspark.kernels.quant_math import FP8_MAX, quantize_tokens, round_tokens_to_fp8
from dspark.runtime.spec.quant import QuantScheme


def rounds_inputs(scheme: QuantScheme) -> bool:
    """Whether a linear of the scheme rounds what it reads."""
    return scheme.storage == "int8" or scheme.inputs is not None


def rounded_tokens(statistics: LayerStatistics, scheme: QuantScheme) -> torch.Tensor:
    """The tokens [S, K] that the statistics keep, as the scheme's kernels round them."""
    assert statistics.tokens is not None
    if scheme.storage == "int8":
        codes, scale = quantize_tokens(statistics.tokens)
        return codes.float() * scale
    return round_tokens_to_fp8(statistics.tokens, statistics.max_abs.amax() / FP8_MAX if scheme.inputs == "static" else None)


def with_input_error(
    result: QuantizedWeight, weight: torch.Tensor, scheme: QuantScheme, statistics: LayerStatistics | None
) -> QuantizedWeight:
    """The result for a weight [N, K] with the rounding of its inputs in the outputs' error, where the scheme rounds them."""
    if not rounds_inputs(scheme) or statistics is None or statistics.tokens is None or not len(statistics.tokens):
        return result
    wanted = statistics.tokens @ weight.float().t()
    got = rounded_tokens(statistics, scheme) @ result.weight.dense(torch.float32).t()
    return replace(result, output_sqnr_db=decibels(energy(wanted), energy(got - wanted)))
