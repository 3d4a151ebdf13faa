"""Gated feed-forward layer (SwiGLU, GeGLU)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dspark.kernels.ops import Kernels, LinearFn
from dspark.runtime.layers.linear import load_linear
from dspark.runtime.layers.weights import WeightSource
from dspark.runtime.spec.quant import QuantConfig

FeedForward = Callable[[torch.Tensor], torch.Tensor]
"""A layer's second block: x [T, H] -> [T, H]."""

_ACTIVATIONS = {"silu": "silu_and_mul", "gelu_pytorch_tanh": "gelu_tanh_and_mul"}


@dataclass
class GatedMLP:
    """x [T, H] -> down(activation(gate(x)) * up(x)) [T, H]; gate and up are one projection, gate first."""

    gate_up_proj: LinearFn
    down_proj: LinearFn
    activation: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(x)))


def load_gated_mlp(name: str, hidden_act: str, quant: QuantConfig | None, weights: WeightSource, kernels: Kernels) -> GatedMLP:
    """The gated feed-forward block whose modules stand below `name`. hidden_act: see ModelConfig."""
    return GatedMLP(
        gate_up_proj=load_linear([f"{name}.gate_proj", f"{name}.up_proj"], weights, quant, kernels),
        down_proj=load_linear([f"{name}.down_proj"], weights, quant, kernels),
        activation=getattr(kernels, _ACTIVATIONS[hidden_act]),
    )
