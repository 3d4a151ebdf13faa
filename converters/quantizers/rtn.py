"""Round to nearest, with a search for the clipping of each group that loses least.

The largest weight of a group sets its step; giving up a little of it makes the step finer for all others. Each group tries the ratios below
and keeps the one with the smallest squared error; the ratio 1 (no clipping) is among them, so the search is never worse than going without.
The step is rounded to its stored type before any code is computed: the codes then belong to the step that the kernels will use.
"""

from __future__ import annotations

import math

import torch

from dspark.converters.quantizers.base import DEFAULTS, QuantizedWeight, SolverOptions
from dspark.converters.quantizers.statistics import LayerStatistics
from dspark.converters.threads import map_slices
from dspark.kernels.packing import pack_codes
from dspark.kernels.quant_math import group_range, quantize_groups, scale_and_zero
from dspark.kernels.wna16 import Wna16Weight
from dspark.runtime.spec.quant import QuantScheme

CLIP_RATIOS: dict[int, tuple[float, ...]] = {
    8: (1.0, 0.98, 0.95, 0.9),
    4: tuple(1.0 - 0.03 * step for step in range(15)),
}
_CHUNK_ELEMENTS = 1 << 18  # a chunk of rows stays in the cache through the whole search
_HALF = torch.finfo(torch.float16)


def quantize_rtn(
    weight: torch.Tensor, scheme: QuantScheme, statistics: LayerStatistics | None = None, options: SolverOptions = DEFAULTS
) -> QuantizedWeight:
    """Canonical storage of a weight float32 [N, K]; group_size must divide K."""
    outputs, inputs = weight.shape
    group_size = scheme.resolved_group_size(inputs)
    if inputs % group_size:
        raise ValueError(f"group size {group_size} does not divide {inputs} inputs")
    ratios = CLIP_RATIOS[scheme.weight_bits] if options.clip else (1.0,)
    groups = weight.float().reshape(outputs, inputs // group_size, group_size)
    dtype = scale_dtype(groups, scheme, min(ratios))
    rows = max(1, _CHUNK_ELEMENTS // inputs)

    def quantize_rows(chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, float]:
        scale, zero, error = search_clipping(chunk, scheme.weight_bits, scheme.symmetric, ratios, dtype)
        codes = quantize_groups(chunk, scale, zero, scheme.weight_bits).to(torch.uint8)
        return codes, scale.to(dtype), zero.to(torch.uint8), float(chunk.double().square().sum()), float(error.double().sum())

    codes, scales, zeros, signal, noise = zip(*map_slices(quantize_rows, groups.split(rows)), strict=True)
    packed = Wna16Weight(
        qweight=pack_codes(torch.cat(codes).reshape(outputs, inputs).t(), scheme.weight_bits),
        scales=torch.cat(scales).t().contiguous(),
        zeros=None if scheme.symmetric else torch.cat(zeros).t().contiguous(),
        bits=scheme.weight_bits,
        in_features=inputs,
    )
    return QuantizedWeight(packed, sqnr_db(sum(signal), sum(noise)))


def search_clipping(
    groups: torch.Tensor, bits: int, symmetric: bool, ratios: tuple[float, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Step, zero point and squared error [n, G] of groups [n, G, g] at the best ratio of each; the step is a value of `dtype`."""
    low, high = group_range(groups, symmetric)
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for ratio in ratios:
        scale, _ = scale_and_zero(low * ratio, high * ratio, bits, symmetric)
        scale = scale.to(dtype).float()
        zero = zero_point(low * ratio, scale, bits, symmetric)
        error = quantize_groups(groups, scale, zero, bits).sub_(zero[..., None]).mul_(scale[..., None]).sub_(groups).square_().sum(-1)
        if best is None:
            best = scale, zero, error
        else:
            better = error < best[2]
            best = tuple(torch.where(better, new, old) for new, old in zip((scale, zero, error), best, strict=True))  # type: ignore[assignment]
    assert best is not None
    return best


def zero_point(low: torch.Tensor, scale: torch.Tensor, bits: int, symmetric: bool) -> torch.Tensor:
    """Zero point for the step as it is stored (rounding the step moves it)."""
    if symmetric:
        return torch.full_like(scale, 2.0 ** (bits - 1))
    return torch.round(-low / scale).clamp_(0, 2**bits - 1)


def scale_dtype(groups: torch.Tensor, scheme: QuantScheme, smallest_ratio: float) -> torch.dtype:
    """float16, or float32 where a step would leave float16's normal range (a subnormal step has few digits, a zero one divides by zero)."""
    low, high = group_range(groups, scheme.symmetric)
    scale, _ = scale_and_zero(low, high, scheme.weight_bits, scheme.symmetric)
    fits = bool(scale.min() * smallest_ratio >= _HALF.tiny) and bool(scale.max() <= _HALF.max)
    return torch.float16 if fits else torch.float32


def sqnr_db(signal: float, noise: float) -> float | None:
    """10 log10(signal / noise), or None when there is no noise or no signal."""
    return round(10 * math.log10(signal / noise), 3) if noise > 0 and signal > 0 else None
