"""Temperature, top-k, top-p and min-p: the probabilities that a token is drawn from. The slow clear form, on torch tensors.

The order is that of transformers: temperature, top-k, top-p, min-p, each on the probabilities that the one before left, renormalised.
Ties at a cut are broken by token id, lower first.
"""

from __future__ import annotations

import torch

TEMPERATURE_MIN, TEMPERATURE_MAX = 1e-30, 1e30


def usable_temperature(temperature: float) -> float:
    """A temperature that float32 can divide by: beyond these bounds it and its inverse are 0 or infinite, and 0 * infinity is NaN.

    The lower one is greedy but for exact ties, the upper one uniform.
    """
    return min(max(temperature, TEMPERATURE_MIN), TEMPERATURE_MAX)


def ranks(logits: torch.Tensor) -> torch.Tensor:
    """Token ids of one row [V] from likely to unlikely, equal ones by id."""
    return torch.sort(logits, descending=True, stable=True).indices


def probabilities(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Row [V] of float32 logits -> probabilities [V] (float32) with the dropped tokens at 0. temperature > 0."""
    logits = logits.float()
    probs = torch.softmax((logits - logits.max()) / usable_temperature(temperature), -1)
    order = ranks(probs)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if 0 < top_k < probs.numel():
        keep[order[top_k:]] = False
    if top_p < 1.0:
        kept = torch.where(keep, probs, 0.0)
        mass_before = kept[order].cumsum(-1, dtype=torch.float64) - kept[order]
        keep[order] &= mass_before < top_p * kept.sum(dtype=torch.float64)
    if min_p > 0.0:
        keep &= probs >= min_p * probs.max()
    kept = torch.where(keep, probs, 0.0)
    return kept / kept.sum()
