"""Checks of the grouped products of experts, for `triton_gemm_checks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gemm_cases import fp8_linear_args, int8_linear_args
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import dense_linear_args, wna16_linear_args

from dspark.kernels.experts import ExpertWeights
from dspark.kernels.facts import KernelFacts
from dspark.kernels.reference import moe as reference
from dspark.kernels.triton import moe

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


def facts(dtype: torch.dtype, deterministic: bool = False) -> KernelFacts:
    shape = {"head_dim": 64, "num_heads": 4, "num_kv_heads": 2, "block_size": 16}
    return KernelFacts("cpu", dtype, **shape, interpreted=True, deterministic=deterministic)


def stacks(kind: str, dtype: torch.dtype, seed: int, num_experts: int, hidden: int, inner: int) -> tuple[ExpertWeights, ExpertWeights]:
    """gate_up [E, 2 * inner, hidden] and down [E, hidden, inner] of random experts."""
    gate_up, down = ExpertWeights(num_experts), ExpertWeights(num_experts)
    for expert in range(num_experts):
        gate_up.put(expert, KINDS[kind](dtype, seed + 2 * expert, 2 * inner, hidden))
        down.put(expert, KINDS[kind](dtype, seed + 2 * expert + 1, hidden, inner))
    return gate_up, down


def close(kind: str, dtype: torch.dtype, y: torch.Tensor, want: torch.Tensor) -> None:
    relative = 2e-2 if kind in ROUNDED else 1e-4 if dtype is torch.float32 else 6e-3
    assert y.dtype == want.dtype and y.shape == want.shape
    error, largest = (y.float() - want.float()).abs(), want.float().abs()
    assert not y.numel() or float(error.max()) <= relative * max(float(largest.max()), 0.1), (kind, float(error.max()))


@settings(max_examples=16, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(list(KINDS)),
    st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from([0, 1, 2, 19, 70]),
    st.integers(2, 6),
    st.integers(1, 3),
    st.sampled_from(["silu", "gelu_pytorch_tanh"]),
    st.booleans(),
    st.integers(0, 99),
)
def grouped_experts_equal_the_loop(
    kind: str, dtype: torch.dtype, tokens: int, num_experts: int, top_k: int, activation: str, renormalize: bool, seed: int
) -> None:
    top_k, (hidden, inner) = min(top_k, num_experts), ((64, 96) if seed % 2 else (128, 64))
    weights = stacks(kind, dtype, seed, num_experts, hidden, inner)
    g = torch.Generator().manual_seed(seed)
    x, logits = torch.randn(tokens, hidden, generator=g).to(dtype), 2 * torch.randn(tokens, num_experts, generator=g).to(dtype)
    y = moe.make_grouped_experts(*weights, activation, facts(dtype))(x, logits, top_k, renormalize)
    want = reference.make_grouped_experts(*weights, activation, facts(dtype))(x, logits, top_k, renormalize)
    close(kind, dtype, y, want)


def one_expert_takes_every_token() -> None:
    """More row tiles than a fair share, and experts without a row."""
    weights = stacks("dense", torch.float32, 1, 5, 64, 32)
    x, logits = torch.randn(150, 64), torch.zeros(150, 5)
    logits[:, 3] = 9
    y = moe.make_grouped_experts(*weights, "silu", facts(torch.float32))(x, logits, 1, False)
    close("dense", torch.float32, y, reference.make_grouped_experts(*weights, "silu", facts(torch.float32))(x, logits, 1, False))


def rows_of_deterministic_runs_depend_on_nothing_else() -> None:
    for kind in ("dense", "w4", "fp8 blocks", "fp8 blocks dynamic"):
        weights = stacks(kind, torch.float16, 1, 3, 64, 64)
        layer = moe.make_grouped_experts(*weights, "silu", facts(torch.float16, deterministic=True))
        x, logits = torch.randn(70, 64).half(), torch.randn(70, 3).half()
        whole = layer(x, logits, 2, True)
        for rows in (slice(0, 1), slice(5, 20)):
            assert torch.equal(layer(x[rows], logits[rows], 2, True), whole[rows]), kind


def rows_are_sorted_by_expert() -> None:
    """Three tokens, experts (0, 3), (1, 3), (0, 1): pairs of expert 0 are those of tokens 0 and 2, expert 2 has none."""
    pairs, starts = moe.sorted_by_expert(torch.tensor([[0, 3], [1, 3], [0, 1]]), 4)
    assert pairs.tolist() == [0, 4, 2, 5, 1, 3] and starts.tolist() == [0, 2, 4, 4, 6]


MOE_CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        grouped_experts_equal_the_loop,
        one_expert_takes_every_token,
        rows_of_deterministic_runs_depend_on_nothing_else,
        rows_are_sorted_by_expert,
    )
}
