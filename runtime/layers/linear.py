"""Linear layers of a model: which storage each has, and fusing those that read the same input."""

from __future__ import annotations

import torch

from dspark.kernels.ops import Kernels, LinearFn, Wna16Weight
from dspark.runtime.layers.weights import WeightSource
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.quant import QuantConfig


def load_linear(names: list[str], weights: WeightSource, quant: QuantConfig | None, kernels: Kernels) -> LinearFn:
    """The function x [T, K] -> [T, sum of N] of one or more modules that read the same input, stacked along their outputs.

    names: module names (without `.weight`). Modules of different storage cannot be stacked: they run one after the other.
    """
    storages = [quant.scheme_for(name) if quant else None for name in names]
    if any(storage != storages[0] for storage in storages):
        parts = [load_linear([name], weights, quant, kernels) for name in names]
        return lambda x: torch.cat([part(x) for part in parts], -1)
    bias = _stacked_bias(names, weights)
    scheme = storages[0]
    if scheme is None:
        dense = [weights.take(f"{name}.weight") for name in names]
        return kernels.dense_linear(dense[0] if len(dense) == 1 else torch.cat(dense), bias)
    qweights = [weights.take(f"{name}.qweight") for name in names]
    scales = [weights.take(f"{name}.scales") for name in names]
    zeros = None if scheme.symmetric else torch.cat([weights.take(f"{name}.zeros") for name in names], 1)
    wide = torch.float32 if any(s.dtype == torch.float32 for s in scales) else scales[0].dtype
    in_features = qweights[0].shape[0] * 32 // scheme.weight_bits
    if in_features % scales[0].shape[0]:
        raise InputError(f"{names[0]}: {scales[0].shape[0]} groups do not divide {in_features} inputs", "quantize again")
    packed = Wna16Weight(torch.cat(qweights, 1), torch.cat([s.to(wide) for s in scales], 1), zeros, scheme.weight_bits, in_features)
    return kernels.wna16_linear(packed, bias)


def _stacked_bias(names: list[str], weights: WeightSource) -> torch.Tensor | None:
    if f"{names[0]}.bias" not in weights:
        return None
    return torch.cat([weights.take(f"{name}.bias") for name in names])
