"""Linear layers of a model: which storage each has, and fusing those that read the same input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dspark.kernels.ops import Kernels, LinearFn
from dspark.runtime.layers import fp8, int8, wna16
from dspark.runtime.layers.weights import WeightSource
from dspark.runtime.spec.quant import QuantConfig, QuantScheme

Build = Callable[[str, QuantScheme, dict[str, torch.Tensor]], Any]
Stack = Callable[[list[Any]], Any]
BUILD: dict[str, Build] = {"wna16": wna16.build, "fp8": fp8.build, "int8": int8.build}
"""storage -> (module, scheme, its tensors by the last part of their names) -> the kernels' weight"""
STACK: dict[str, Stack] = {"wna16": wna16.stack, "fp8": fp8.stack, "int8": int8.stack}
"""storage -> (weights that read the same input) -> one weight of their outputs side by side, or None when they cannot share one"""


def build_weight(module: str, scheme: QuantScheme, parts: dict[str, torch.Tensor]) -> Any:
    """The weight of a quantized linear from the tensors that an engine stores. Raises InputError when they do not fit its scheme."""
    return BUILD[scheme.storage](module, scheme, parts)


def load_linear(names: list[str], weights: WeightSource, quant: QuantConfig | None, kernels: Kernels) -> LinearFn:
    """The function x [T, K] -> [T, sum of N] of one or more modules that read the same input, stacked along their outputs.

    names: module names (without `.weight`). Modules that cannot be stacked (other storage, other order of inputs) run one after the other.
    """
    loaded, stacked = load_weights(names, weights, quant)
    biases = [weights.take(f"{name}.bias") if f"{name}.bias" in weights else None for name in names]
    if stacked is not None:
        return _linear(stacked, _stacked_bias(biases, loaded), kernels)
    parts = [_linear(weight, bias, kernels) for weight, bias in zip(loaded, biases, strict=True)]
    return lambda x: torch.cat([part(x) for part in parts], -1)


def load_weights(names: list[str], weights: WeightSource, quant: QuantConfig | None) -> tuple[list[Any], Any]:
    """(the modules' weights, one of their outputs side by side or None when they cannot share one). See `load_linear`."""
    schemes = [quant.scheme_for(name) if quant else None for name in names]
    storages = {scheme.storage if scheme else None for scheme in schemes}
    loaded = [_load(name, scheme, weights) for name, scheme in zip(names, schemes, strict=True)]
    return loaded, _stacked(loaded, storages)


def _load(name: str, scheme: QuantScheme | None, weights: WeightSource) -> Any:
    if scheme is None:
        return weights.take(f"{name}.weight")
    return build_weight(name, scheme, {leaf: weights.take(f"{name}.{leaf}") for leaf in scheme.leaves()})


def _stacked(loaded: list[Any], storages: set[str | None]) -> Any:
    """One weight of all, or None when they cannot share one."""
    if len(loaded) == 1:
        return loaded[0]
    if len(storages) > 1:
        return None
    storage = next(iter(storages))
    return torch.cat(loaded) if storage is None else STACK[storage](loaded)


def _stacked_bias(biases: list[torch.Tensor | None], loaded: list[Any]) -> torch.Tensor | None:
    """Biases side by side, or None; a module without one adds zeros where another has one."""
    known = next((bias for bias in biases if bias is not None), None)
    if known is None or len(biases) == 1:
        return known
    return torch.cat([known.new_zeros(_outputs(weight)) if bias is None else bias for bias, weight in zip(biases, loaded, strict=True)])


def _outputs(weight: Any) -> int:
    return int(weight.shape[0]) if isinstance(weight, torch.Tensor) else int(weight.out_features)


def _linear(weight: Any, bias: torch.Tensor | None, kernels: Kernels) -> LinearFn:
    if isinstance(weight, torch.Tensor):
        return kernels.dense_linear(weight, bias)
    if isinstance(weight, wna16.Wna16Weight):
        return kernels.wna16_linear(weight, bias)
    return kernels.fp8_linear(weight, bias) if isinstance(weight, fp8.Fp8Weight) else kernels.int8_linear(weight, bias)
