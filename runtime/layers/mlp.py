"""Gated feed-forward layer (SwiGLU)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark.kernels.ops import Kernels, LinearFn


@dataclass
class GatedMLP:
    """x [T, H] -> down(silu(gate(x)) * up(x)) [T, H]; gate and up are one projection, gate first."""

    gate_up_proj: LinearFn
    down_proj: LinearFn
    kernels: Kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.kernels.silu_and_mul(self.gate_up_proj(x)))
