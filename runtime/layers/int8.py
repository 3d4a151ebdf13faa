"""Linears of 8-bit integers with 8-bit activations: from an engine's tensors to the kernels' weight."""

from __future__ import annotations

import torch

from dspark.kernels.ops import Int8Weight
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.quant import QuantScheme


def build(module: str, scheme: QuantScheme, parts: dict[str, torch.Tensor]) -> Int8Weight:
    """The weight of one module. Raises InputError when there is not one scale for each output."""
    qweight, scales = parts["qweight"], parts["scales"]
    if scales.shape != (qweight.shape[0],):
        raise InputError(f"{module}: {list(scales.shape)} scales for {qweight.shape[0]} outputs", "convert again")
    return Int8Weight(qweight, scales)


def stack(weights: list[Int8Weight]) -> Int8Weight | None:
    """Outputs side by side: the modules read one input, which is quantized once for all."""
    return Int8Weight(torch.cat([w.qweight for w in weights]), torch.cat([w.scales for w in weights]))
