"""Checks of the grouped products of experts, for `triton_gemm_checks`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from expert_cases import KINDS, close, expert_layer_inputs, stacks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.kernels.facts import KernelFacts
from dspark.kernels.reference import moe as reference
from dspark.kernels.triton import moe


def facts(dtype: torch.dtype, deterministic: bool = False) -> KernelFacts:
    shape = {"head_dim": 64, "num_heads": 4, "num_kv_heads": 2, "block_size": 16}
    return KernelFacts("cpu", dtype, **shape, interpreted=True, deterministic=deterministic)


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
    x, logits = expert_layer_inputs(dtype, tokens, num_experts, hidden, seed)
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
