"""SmoothQuant: divide the activations' outliers down and multiply the weights that read them up, so that both fit 8 bits.

An activation channel of magnitude x whose weights have magnitude w is divided by x ** alpha / w ** (1 - alpha): alpha 1 makes all channels
of the activations alike, 0 all those of the weights. Source: SmoothQuant (arXiv 2211.10438), section 4.

K channels, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.converters.quantizers.statistics import LayerStatistics
from dspark.kernels.quant_math import INT8_STEPS, quantize_tokens

ALPHA = 0.5
"""The paper's own choice."""
ALPHAS = tuple(step / 20 for step in range(6, 21))
"""What `best_alpha` tries: 0.3 to 1."""
_SMALLEST = 1e-5


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
    """The one of ALPHAS that loses least by `error_8_bit`; ALPHA where no channel was ever active, or no token was kept."""
    tokens = statistics.tokens
    if tokens is None or not bool(tokens.any()):
        return ALPHA
    energy = torch.stack([weight.square().sum(0) for weight in weights]).sum(0)
    errors = [error_8_bit(tokens, scales_for(statistics.max_abs, largest_weight, alpha), weights, energy) for alpha in ALPHAS]
    return ALPHAS[min(range(len(errors)), key=errors.__getitem__)]


def error_8_bit(tokens: torch.Tensor, scales: torch.Tensor, weights: Sequence[torch.Tensor], energy: torch.Tensor) -> float:
    """Estimated squared error of all outputs, a mean over tokens [S, K], with scaled tokens and weights rounded to 8 bits.

    energy [K]: of the weights, the sum of squares. What the tokens are off by is known, what of it two channels have in common is left out;
    rounding a weight to a step is off by step ** 2 / 12 on average.
    """
    scaled = tokens / scales
    codes, steps = quantize_tokens(scaled)
    token_part = float(((codes.float() * steps - scaled).square().mean(0) * energy * scales.square()).sum())
    weight_steps = sum(float((weight * scales).abs().amax(1).square().sum()) for weight in weights) / INT8_STEPS**2
    return token_part + weight_steps / 12 * float(scaled.square().mean(0).sum())
