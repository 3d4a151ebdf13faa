"""Random experts of every kind of weight, side by side, and how near two results of them must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gemm_cases import fp8_linear_args, int8_linear_args
from kernel_cases import copied, dense_linear_args, wna16_linear_args

from dspark.kernels.experts import ExpertWeights

KINDS: dict[str, Callable[..., Any]] = {
    "dense": lambda dtype, seed, outputs, inputs: dense_linear_args(dtype, seed, 1, inputs, outputs)[0],
    "w4": lambda dtype, seed, outputs, inputs: wna16_linear_args(dtype, seed, 1, inputs, outputs, group_size=32)[0],
    "w8 asymmetric": lambda dtype, seed, outputs, inputs: wna16_linear_args(dtype, seed, 1, inputs, outputs, 8, False, 32)[0],
    "fp8": lambda dtype, seed, outputs, inputs: fp8_linear_args(dtype, seed, 1, inputs, outputs)[0],
    "fp8 blocks": lambda dtype, seed, outputs, inputs: fp8_linear_args(dtype, seed, 1, inputs, outputs, (32, 64))[0],
    "w8a8": lambda dtype, seed, outputs, inputs: int8_linear_args(dtype, seed, 1, inputs, outputs)[0],
    "fp8 dynamic": lambda dtype, seed, outputs, inputs: fp8_linear_args(dtype, seed, 1, inputs, outputs, inputs="dynamic")[0],
    "fp8 blocks dynamic": lambda dtype, seed, outputs, inputs: fp8_linear_args(dtype, seed, 1, inputs, outputs, (64, 32), "dynamic")[0],
}
ROUNDED = ("w8a8", "fp8 dynamic", "fp8 blocks dynamic")
"""Kinds whose inputs are rounded: where two sums differ in the last bit, one may fall to the other side of a step."""


def stacks(kind: str, dtype: torch.dtype, seed: int, num_experts: int, hidden: int, inner: int) -> tuple[ExpertWeights, ExpertWeights]:
    """gate_up [E, 2 * inner, hidden] and down [E, hidden, inner] of random experts."""
    gate_up, down = ExpertWeights(num_experts), ExpertWeights(num_experts)
    for expert in range(num_experts):
        gate_up.put(expert, KINDS[kind](dtype, seed + 2 * expert, 2 * inner, hidden))
        down.put(expert, KINDS[kind](dtype, seed + 2 * expert + 1, hidden, inner))
    return gate_up, down


def expert_layer_inputs(dtype: torch.dtype, tokens: int, num_experts: int, hidden: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(x [T, H], router_logits [T, E])"""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, hidden, generator=g).to(dtype), 2 * torch.randn(tokens, num_experts, generator=g).to(dtype)


def on_device(weights: ExpertWeights, device: str = "cuda") -> ExpertWeights:
    """The same weights elsewhere."""
    moved = ExpertWeights(weights.num_experts)
    for expert in range(weights.num_experts):
        moved.put(expert, copied(weights.expert(expert), device))
    return moved


def close(kind: str, dtype: torch.dtype, y: torch.Tensor, want: torch.Tensor) -> None:
    relative = 2e-2 if kind in ROUNDED or dtype is torch.bfloat16 else 1e-4 if dtype is torch.float32 else 6e-3
    assert y.dtype == want.dtype and y.shape == want.shape
    error, largest = (y.float() - want.float()).abs(), want.float().abs()
    assert not y.numel() or float(error.max()) <= relative * max(float(largest.max()), 0.1), (kind, float(error.max()))
