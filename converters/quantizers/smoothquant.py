"""SmoothQuant: divide the activations' outliers down and multiply the weights that read them up, so that both fit 8 bits.

An activation channel of magnitude x whose weights have magnitude w is divided by x ** alpha / w ** (1 - alpha): alpha 1 makes all channels
of the activations alike, 0 all those of the weights. Source: SmoothQuant (arXiv 2211.10438), section 4.

T tokens, K channels, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.converters.quantizers.statistics import LayerStatistics
from dspark.kernels.quant_math import quantize_tokens

ALPHA = 0.5
ALPHAS = tuple(step / 20 for step in range(6, 19))
"""What `best_alpha` tries: 0.3 to 0.9."""
_SMALLEST = 1e-5


def smooth_scales(
    statistics: LayerStatistics, weights: Sequence[torch.Tensor], alpha: float | None = None, samples: torch.Tensor | None = None
) -> tuple[torch.Tensor, float]:
    """The factors [K] of the inputs of linears that read one operation's result, and the alpha that made them.

    statistics: of all tokens that the operation made. weights [N, K] of every linear that will be quantized. alpha: None chooses the best
    one for some of the inputs, samples [T, K] (what rounding a token costs hangs on its own largest value, which the statistics do not
    have), and without samples takes ALPHA. No input is changed.
    """
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    if alpha is None:
        alpha = ALPHA if samples is None else best_alpha(statistics.max_abs, largest, weights, samples)
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


def best_alpha(max_abs: torch.Tensor, largest_weight: torch.Tensor, weights: Sequence[torch.Tensor], samples: torch.Tensor) -> float:
    """The one of ALPHAS with the smallest squared error of the outputs for samples [T, K], both sides in 8 bits."""
    errors = [_error_8_bit(scales_for(max_abs, largest_weight, alpha), weights, samples.float()) for alpha in ALPHAS]
    return ALPHAS[min(range(len(errors)), key=errors.__getitem__)]


def _error_8_bit(scales: torch.Tensor, weights: Sequence[torch.Tensor], samples: torch.Tensor) -> float:
    x = _as_8_bit(samples / scales)
    return sum(float((x @ _as_8_bit(weight * scales).t() - samples @ weight.t()).double().square().sum()) for weight in weights)


def _as_8_bit(rows: torch.Tensor) -> torch.Tensor:
    """Rows [T, K] as 8-bit integers with a step for each row stand for them; tokens and outputs are rounded by the same rule."""
    codes, step = quantize_tokens(rows)
    return codes * step
