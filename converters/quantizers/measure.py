"""How far a quantized weight is from the original: by itself, and in the outputs over the calibration tokens. K inputs, N outputs."""

from __future__ import annotations

import math

import torch

_STRIP = 256


def decibels(signal: float, noise: float) -> float | None:
    """10 log10(signal / noise), or None when there is no noise or no signal."""
    return round(10 * math.log10(signal / noise), 3) if noise > 0 and signal > 0 else None


def energy(values: torch.Tensor) -> float:
    """Sum of squares, in the values' own type."""
    flat = values.reshape(-1)
    return float(torch.dot(flat, flat))


def all_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite, in one pass that allocates nothing."""
    return values.numel() == 0 or all(bool(end.isfinite()) for end in torch.aminmax(values))


def output_energy(weight: torch.Tensor, hessian: torch.Tensor) -> float:
    """tr(W^T H W) of W [K, N] and a symmetric H [K, K]: twice the mean over tokens of the squared outputs. Half of H is read."""
    total = 0.0
    for start in range(0, len(weight), _STRIP):
        rows, stop = weight[start : start + _STRIP], start + _STRIP
        products = hessian[start:stop, start:stop] @ rows
        if stop < len(weight):
            products.addmm_(hessian[start:stop, stop:], weight[stop:], alpha=2)
        total += float(products.mul_(rows).sum(dtype=torch.float64))
    return total
