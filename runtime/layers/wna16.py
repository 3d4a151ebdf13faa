"""Linears of integer codes with 16-bit activations: from an engine's tensors to the kernels' weight."""

from __future__ import annotations

import torch

from dspark.kernels.ops import Wna16Weight
from dspark.kernels.packing import packed_rows
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.quant import QuantScheme


def build(module: str, scheme: QuantScheme, parts: dict[str, torch.Tensor]) -> Wna16Weight:
    """The weight of one module. The number of inputs follows from groups and group size: packed rows alone may hold padding.

    Raises InputError when the tensors do not fit each other.
    """
    qweight, scales = parts["qweight"], parts["scales"]
    num_groups, bits = int(scales.shape[0]), scheme.weight_bits
    in_features = int(qweight.shape[0]) * 32 // bits if scheme.group_size == -1 else num_groups * scheme.group_size
    zeros, perm = parts.get("zeros"), parts.get("perm")
    expected = (num_groups, int(qweight.shape[1]))
    fits = (
        packed_rows(in_features, bits) == qweight.shape[0]
        and scales.shape == expected
        and (scheme.group_size != -1 or num_groups == 1)
        and (zeros is None or zeros.shape == expected)
        and (perm is None or perm.shape == (in_features,))
    )
    if not fits:
        shapes = ", ".join(f"{leaf} {list(tensor.shape)}" for leaf, tensor in parts.items())
        raise InputError(f"{module}: {shapes} do not fit each other with {bits} bits and groups of {scheme.group_size}", "convert again")
    return Wna16Weight(qweight, scales, zeros, bits, in_features, perm)


def stack(weights: list[Wna16Weight]) -> Wna16Weight | None:
    """Outputs side by side; None when bits, groups or the order of inputs differ."""
    first = weights[0]
    if any((w.bits, w.in_features, w.scales.shape[0]) != (first.bits, first.in_features, first.scales.shape[0]) for w in weights):
        return None
    if any(not _same_perm(w.perm, first.perm) for w in weights):
        return None
    dtypes = {w.scales.dtype for w in weights}
    wide = first.scales.dtype if len(dtypes) == 1 else torch.float32
    zeros = None if all(w.zeros is None for w in weights) else torch.cat([_zeros(w) for w in weights], 1)
    return Wna16Weight(
        torch.cat([w.qweight for w in weights], 1),
        torch.cat([w.scales.to(wide) for w in weights], 1),
        zeros,
        first.bits,
        first.in_features,
        first.perm,
    )


def _same_perm(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _zeros(weight: Wna16Weight) -> torch.Tensor:
    """Zero points, spelled out where the weight is symmetric."""
    if weight.zeros is not None:
        return weight.zeros
    return torch.full(weight.scales.shape, 2 ** (weight.bits - 1), dtype=torch.uint8, device=weight.scales.device)
