"""The arithmetic of moving factors for each channel: pure functions of dense float32 tensors; no input is ever changed.

K: channels of a group, the linears' inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dspark.converters.scaling.groups import ScalingGroup


def fold_norm(weight: torch.Tensor, scales: torch.Tensor, offset: bool = False) -> torch.Tensor:
    """The norm weight [K] that makes a norm's result smaller by scales [K]. offset: the norm multiplies by 1 + weight."""
    return (1.0 + weight) / scales - 1.0 if offset else weight / scales


def fold_outputs(tensor: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A linear's weight [N, K] or bias [N] whose outputs are smaller by scales [N]."""
    return tensor / (scales[:, None] if tensor.ndim == 2 else scales)


def fold_inputs(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A linear's weight [N, K] for inputs that are smaller by scales [K]."""
    return weight * scales


def fold_group(tensors: Mapping[str, torch.Tensor], group: ScalingGroup, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """Move scales [K] of the linears' inputs into the group's previous operation.

    tensors: by name, at least those of the group's modules; biases where the model has them. Returns the tensors that change, by name.
    Raises ValueError for scales that are not finite and above zero, of another length, or that differ between query heads that share a head
    of values (`ScalingGroup.legal_scales`); KeyError for a module that is missing.
    """
    check_scales(group, scales)
    weight, bias = f"{group.previous}.weight", f"{group.previous}.bias"
    inverse = group.previous_scales(scales)
    changed: dict[str, torch.Tensor] = {}
    if group.is_norm:
        changed[weight] = fold_norm(tensors[weight], inverse, group.norm_offset)
    else:
        changed[weight] = fold_outputs(tensors[weight], inverse)
        if bias in tensors:
            changed[bias] = fold_outputs(tensors[bias], inverse)
    for linear in group.linears:
        name = f"{linear}.weight"
        changed[name] = fold_inputs(tensors[name], scales)
    return changed


def check_scales(group: ScalingGroup, scales: torch.Tensor) -> None:
    """Raise ValueError for scales that cannot be moved; see `fold_group`."""
    if tuple(scales.shape) != (group.channels,):
        raise ValueError(f"scales of {group.previous} have shape {list(scales.shape)}, not [{group.channels}]")
    if not bool((scales > 0).all() and scales.isfinite().all()):
        raise ValueError(f"scales of {group.previous} must be finite and above 0, found {float(scales.min()):g} to {float(scales.max()):g}")
    if not torch.allclose(scales, group.legal_scales(scales), rtol=1e-6, atol=0.0):
        raise ValueError(f"scales of {group.previous} differ between query heads that share a head of values")


def storable_scales(group: ScalingGroup, norm_weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The factors [K] next to `scales` for which the folded norm is a value of the dtype it is stored in.

    A norm weight that is rounded after the division would change the model; with these factors the linears take up that rounding (they are
    quantized, or at least wide). norm_weight [K] is as stored, before folding. Groups without a norm get `scales` back.
    """
    if not group.is_norm:
        return scales
    offset = group.norm_offset
    before = 1.0 + norm_weight if offset else norm_weight
    folded = fold_norm(norm_weight, scales, offset).to(dtype).float()
    after = 1.0 + folded if offset else folded
    exact = before / after
    return torch.where((exact > 0) & exact.isfinite(), exact, scales)
