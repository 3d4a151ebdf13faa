"""Gated feed-forward layer (SwiGLU, GeGLU)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dspark.kernels.ops import InputFormat, Kernels, LinearFn, Rows, input_format
from dspark.runtime.layers.linear import load_linear
from dspark.runtime.layers.weights import WeightSource
from dspark.runtime.spec.quant import QuantConfig

FeedForward = Callable[[Any], torch.Tensor]
"""A layer's second block: x [T, H] -> [T, H]; x are `Rows`."""

_ACTIVATIONS = {"silu": "silu_and_mul", "gelu_pytorch_tanh": "gelu_tanh_and_mul"}


@dataclass
class GatedMLP:
    """x [T, H] -> down(activation(gate(x)) * up(x)) [T, H]; gate and up are one projection, gate first."""

    gate_up_proj: LinearFn
    down_proj: LinearFn
    activation: Callable[[torch.Tensor], Rows]

    @property
    def takes(self) -> InputFormat | None:
        """See `input_format`."""
        return input_format(self.gate_up_proj)

    def __call__(self, x: Rows) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(x)))


def load_gated_mlp(name: str, hidden_act: str, quant: QuantConfig | None, weights: WeightSource, kernels: Kernels) -> GatedMLP:
    """The gated feed-forward block whose modules stand below `name`. hidden_act: see ModelConfig."""
    gate_up_proj = load_linear([f"{name}.gate_proj", f"{name}.up_proj"], weights, quant, kernels)
    down_proj = load_linear([f"{name}.down_proj"], weights, quant, kernels)
    inputs = input_format(down_proj)
    if hidden_act == "silu" and inputs is not None:
        return GatedMLP(gate_up_proj, down_proj, partial(kernels.silu_and_mul_quantize, inputs=inputs))
    return GatedMLP(gate_up_proj, down_proj, getattr(kernels, _ACTIVATIONS[hidden_act]))
