"""Linears of 8-bit floating-point numbers: from an engine's tensors to the kernels' weight."""

from __future__ import annotations

import torch

from dspark.kernels.ops import Fp8Weight
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.quant import QuantScheme

WHOLE = -1


def build(module: str, scheme: QuantScheme, parts: dict[str, torch.Tensor]) -> Fp8Weight:
    """The weight of one module. Raises InputError when the scales do not fit the scheme's blocks."""
    qweight, scales = parts["qweight"], parts["scales"]
    block = scheme.block or (WHOLE, WHOLE)
    extents = [size if size != WHOLE else int(length) for size, length in zip(block, qweight.shape, strict=True)]
    wanted = [-(-int(length) // size) for size, length in zip(extents, qweight.shape, strict=True)]
    if list(scales.shape) != wanted:
        what = f"{module}: scales {list(scales.shape)} do not fit a weight {list(qweight.shape)} in blocks of {extents[0]} x {extents[1]}"
        raise InputError(what, "convert again")
    return Fp8Weight(qweight, scales, block, scheme.inputs, parts.get("input_scale"))


def stack(weights: list[Fp8Weight]) -> Fp8Weight | None:
    """Outputs side by side; None when blocks differ, a block would span two modules, or their inputs are rounded otherwise.

    Scales of whole tensors become scales of outputs, which is exact. The scale of static inputs is the largest of the modules': they read
    the same ones.
    """
    first = weights[0]
    if any(w.block != first.block or w.in_features != first.in_features or w.inputs != first.inputs for w in weights):
        return None
    known = [w.input_scale for w in weights if w.input_scale is not None]
    inputs, scale = first.inputs, torch.stack(known).amax(0) if known else None
    qweight = torch.cat([w.qweight.view(torch.uint8) for w in weights]).view(first.qweight.dtype)  # not every device cats FP8
    if first.block[0] == WHOLE:
        per_output = [w.scales.expand(w.out_features, -1) for w in weights]
        return Fp8Weight(qweight, torch.cat(per_output), (1, first.block[1]), inputs, scale)
    if any(w.out_features % first.block[0] for w in weights[:-1]):
        return None
    return Fp8Weight(qweight, torch.cat([w.scales for w in weights]), first.block, inputs, scale)
