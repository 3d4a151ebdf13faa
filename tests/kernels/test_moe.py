"""Expert routing on paper and against transformers' routers; the grouped form against the plain loop, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from dspark.kernels.dispatch import candidates, implementation, select
from dspark.kernels.facts import KernelFacts
from dspark.kernels.ops import Kernels
from dspark.kernels.reference.moe import route

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
HIDDEN, INNER, EXPERTS = 64, 48, 6


def log(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def kernels(dtype: torch.dtype, deterministic: bool = True, choice: str = "auto") -> Kernels:
    return Kernels(KernelFacts("cpu", dtype, 16, 4, 2, 16, deterministic=deterministic), choice)


def made_experts(bound: Kernels, dtype: torch.dtype) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    g = torch.Generator().manual_seed(1)

    def expert() -> Callable[[torch.Tensor], torch.Tensor]:
        up = bound.dense_linear((torch.randn(2 * INNER, HIDDEN, generator=g) * 0.2).to(dtype))
        down = bound.dense_linear((torch.randn(HIDDEN, INNER, generator=g) * 0.2).to(dtype))
        return lambda x: down(bound.silu_and_mul(up(x)))

    return [expert() for _ in range(EXPERTS)]


def batch(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(x [T, H], router_logits [T, E])"""
    g = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, HIDDEN, generator=g).to(dtype), torch.randn(num_tokens, EXPERTS, generator=g).to(dtype)


def test_routing_on_paper() -> None:
    """Shares are those of the softmax over all experts; renormalized, they add up to 1. Ids ascend."""
    shares, ids = route(log(0.125, 0.25, 0.125, 0.5), 2, renormalize=False)
    assert ids.tolist() == [[1, 3]] and shares.flatten().tolist() == pytest.approx([0.25, 0.5])
    shares, ids = route(log(0.125, 0.25, 0.125, 0.5), 2, renormalize=True)
    assert ids.tolist() == [[1, 3]] and shares.flatten().tolist() == pytest.approx([1 / 3, 2 / 3])


def test_of_equal_experts_the_lower_ids_are_taken() -> None:
    """bfloat16 router logits have 8 digits: ties are common, and must not be settled by luck."""
    assert route(torch.zeros(2, 128), 3, renormalize=True)[1].tolist() == [[0, 1, 2]] * 2
    assert route(torch.tensor([[1.0, 2.0, 1.0, 2.0, 2.0]]), 2, renormalize=False)[1].tolist() == [[1, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("router", "config", "renormalize"),
    [
        (MixtralTopKRouter, transformers.MixtralConfig(num_local_experts=8, num_experts_per_tok=2, hidden_size=32), True),
        (Qwen2MoeTopKRouter, transformers.Qwen2MoeConfig(num_experts=8, num_experts_per_tok=4, hidden_size=32), False),
        (Qwen3MoeTopKRouter, transformers.Qwen3MoeConfig(num_experts=8, num_experts_per_tok=4, hidden_size=32, norm_topk_prob=True), True),
        (Qwen3MoeTopKRouter, transformers.Qwen3MoeConfig(num_experts=8, num_experts_per_tok=4, hidden_size=32), False),
    ],
    ids=["mixtral", "qwen2_moe", "qwen3_moe_norm", "qwen3_moe"],
)
def test_routing_equals_transformers(router: type, config: object, renormalize: bool, dtype: torch.dtype) -> None:
    """Order of softmax, choice and division; transformers rounds Qwen's shares to the model's dtype, we do not."""
    theirs = router(config)
    g = torch.Generator().manual_seed(0)
    theirs.weight.data = torch.randn(8, 32, generator=g)
    theirs.to(dtype)
    with torch.inference_mode():
        logits, want_shares, want_ids = theirs(torch.randn(40, 32, generator=g).to(dtype))
        shares, ids = route(logits, config.num_experts_per_tok, renormalize)  # type: ignore[attr-defined]
    probs = torch.softmax(logits.float(), -1)
    untied = [len(set(row)) == len(row) for row in probs.tolist()]
    want = torch.zeros(40, 8).scatter_(1, want_ids, want_shares.float())
    got = torch.zeros(40, 8).scatter_(1, ids, shares)
    assert sum(untied) > 10
    digits = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(got[untied], want[untied], rtol=digits, atol=1e-7)


def test_experts_are_weighted_and_added_on_paper() -> None:
    """Experts that multiply by 1, 10, 100; token 0 takes 0 and 2, token 1 takes 1 and 2."""
    logits = torch.cat([log(0.5, 0.125, 0.375), log(0.125, 0.25, 0.625)])
    x, experts = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [lambda x, f=f: f * x for f in (1.0, 10.0, 100.0)]
    for name in candidates("moe_mlp"):
        out = implementation(name, "moe_mlp")(x, logits, experts, 2, False)
        torch.testing.assert_close(out, torch.tensor([[38.0, 76.0], [195.0, 260.0]]))
        torch.testing.assert_close(implementation(name, "moe_mlp")(x, logits, experts, 2, True), out / torch.tensor([[0.875], [0.875]]))


@DTYPES
@pytest.mark.parametrize("top_k", [1, 3, EXPERTS])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 65, 130])
def test_grouped_equals_the_plain_loop(num_tokens: int, top_k: int, dtype: torch.dtype) -> None:
    """With the same deterministic linears not one bit differs: both add a token's experts in the order of their ids."""
    bound = kernels(dtype)
    experts, (x, logits) = made_experts(bound, dtype), batch(num_tokens, dtype)
    got = implementation("cpu", "moe_mlp")(x, logits, experts, top_k, True)
    want = implementation("reference", "moe_mlp")(x, logits, experts, top_k, True)
    assert got.dtype == dtype and got.shape == (num_tokens, HIDDEN) and torch.equal(got, want)


@DTYPES
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_token_gets_the_same_bits_in_any_batch(name: str, dtype: torch.dtype) -> None:
    bound = kernels(dtype)
    experts, (x, logits) = made_experts(bound, dtype), batch(150, dtype)
    moe = implementation(name, "moe_mlp")
    whole = moe(x, logits, experts, 3, True)
    for start, stop in [(0, 1), (3, 10), (64, 129), (149, 150)]:
        assert torch.equal(moe(x[start:stop], logits[start:stop], experts, 3, True), whole[start:stop])
    backwards = torch.arange(149, -1, -1)
    assert torch.equal(moe(x[backwards], logits[backwards], experts, 3, True), whole[backwards])


@DTYPES
def test_fast_linears_stay_near_the_reference(dtype: torch.dtype) -> None:
    """Not deterministic: an expert's rows are a slice of one buffer, which products read past to a rounded number of rows."""
    fast, plain = kernels(dtype, deterministic=False), kernels(dtype, choice="reference")
    x, logits = batch(37, dtype)
    got = fast.moe_mlp(x, logits, made_experts(fast, dtype), 3, True)
    want = plain.moe_mlp(x, logits, made_experts(plain, dtype), 3, True)
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_an_expert_that_no_token_takes_is_not_called(name: str) -> None:
    called: list[int] = []

    def expert(index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: (called.append(index), x)[1]

    logits = torch.tensor([[0.0, 5.0, 1.0, -1.0], [0.0, 6.0, 2.0, -1.0]])
    implementation(name, "moe_mlp")(torch.ones(2, 3), logits, [expert(i) for i in range(4)], 2, True)
    assert called == [1, 2]


def test_on_a_gpu_the_plain_loop_runs_and_the_reasons_are_told() -> None:
    """Where experts cannot be grouped they run through the GPU's own linears, one after the other."""
    selection = select("moe_mlp", KernelFacts("cuda", torch.bfloat16, 64, 4, 2, 16))
    assert selection.taken == "reference"
    assert selection.declined == {"triton": "has no such kernel", "cpu": "needs the CPU, the device is cuda"}
