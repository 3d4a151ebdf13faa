"""SmoothQuant: divide the activations' outliers down and multiply the weights that read them up, so that both fit 8 bits.

An activation channel of magnitude x whose weights have magnitude w is divided by x ** alpha / w ** (1 - alpha): alpha 1 makes all channels
of the activations alike, 0 all those of the weights. Source: SmoothQuant (arXiv 2211.10438), section 4.

K channels, N outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dspark.converters.quantizers.statistics import LayerStatistics
from dspark.kernels.quant_math import INT8_STEPS

ALPHA = 0.5
"""The paper's own choice."""
ALPHAS = tuple(step / 20 for step in range(6, 21))
"""What `best_alpha` tries: 0.3 to 1."""
_SMALLEST = 1e-5
_HALVINGS = 30


def smooth_scales(statistics: LayerStatistics, weights: Sequence[torch.Tensor], alpha: float | None = None) -> tuple[torch.Tensor, float]:
    """The factors [K] of the inputs of linears that read one operation's result, and the alpha that made them.

    statistics: of all tokens that the operation made. weights [N, K] of every linear that will be quantized. alpha: None takes the
    best one. No input is changed.
    """
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    if alpha is None:
        alpha = best_alpha(statistics, largest, weights)
    return scales_for(statistics.max_abs, largest, alpha), alpha


def scales_for(max_abs: torch.Tensor, largest_weight: torch.Tensor, alpha: float) -> torch.Tensor:
    """max_abs ** alpha / largest_weight ** (1 - alpha) [K].

    A channel that never was active takes the middle one of the others: nothing is known about it, and the formula would give it a scale
    so small that its first activation would outgrow all others.
    """
    scales = (max_abs**alpha / largest_weight.clamp(min=_SMALLEST) ** (1 - alpha)).clamp(min=_SMALLEST)
    active = max_abs > 0
    if not bool(active.any()):
        return torch.ones_like(scales)
    return torch.where(active, scales, scales[active].median())


def best_alpha(statistics: LayerStatistics, largest_weight: torch.Tensor, weights: Sequence[torch.Tensor]) -> float:
    """The one of ALPHAS that loses least by `error_8_bit`; ALPHA where no channel was ever active."""
    if not bool(statistics.max_abs.any()):
        return ALPHA
    energy = torch.stack([weight.square().sum(0) for weight in weights]).sum(0)
    errors = [error_8_bit(statistics, scales_for(statistics.max_abs, largest_weight, alpha), weights, energy) for alpha in ALPHAS]
    return ALPHAS[min(range(len(errors)), key=errors.__getitem__)]


def error_8_bit(statistics: LayerStatistics, scales: torch.Tensor, weights: Sequence[torch.Tensor], energy: torch.Tensor) -> float:
    """Estimated squared error of all outputs for one token, with scaled inputs and weights rounded to 8 bits. energy [K]: of the weights,
    the sum of squares.

    Rounding to a step is off by step ** 2 / 12 on average. The steps of the weights are known, those of tokens are not: they hang on each
    token's own largest value, of which `largest_of_a_token` is a guess.
    """
    moments = statistics.hessian.diagonal() / 2 / scales.square()
    weight_steps = sum(float((weight * scales).abs().amax(1).square().sum()) for weight in weights)
    largest = largest_of_a_token(moments.sqrt(), statistics.max_abs / scales)
    token_part = largest**2 * float((energy * scales.square()).sum())
    return (weight_steps * float(moments.sum()) + token_part) / (12 * INT8_STEPS**2)


def largest_of_a_token(rms: torch.Tensor, max_abs: torch.Tensor) -> float:
    """A typical token's largest |x|, of channels with root mean squares rms [K] and largest values max_abs [K].

    It is less than the largest value of all tokens, and more than that of Gaussian channels, since activations have heavy tails: the
    geometric mean of both. (On SmolLM2-135M the alpha that follows loses 1 % more than the best one, and 0.5 twice as much.)
    """
    upper = float(max_abs.max())
    low, high = 0.0, 8 * float(rms.max())
    for _ in range(_HALVINGS):  # the value that one channel of a token exceeds on average
        middle = (low + high) / 2
        exceeding = float(torch.erfc(middle / (rms * math.sqrt(2))).sum())
        low, high = (middle, high) if exceeding > 1 else (low, middle)
    return math.sqrt(upper * min(high, upper))
