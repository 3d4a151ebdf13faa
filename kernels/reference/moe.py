"""Mixture of experts in plain torch: which experts a token takes and with what shares, then every expert on the rows that took it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dspark.kernels.experts import ExpertWeights
from dspark.kernels.facts import KernelFacts
from dspark.kernels.fp8 import Fp8Weight
from dspark.kernels.reference import linear
from dspark.kernels.reference.elementwise import gelu_tanh_and_mul, silu_and_mul
from dspark.kernels.wna16 import Wna16Weight

ExpertFn = Callable[[torch.Tensor], torch.Tensor]
"""One expert: rows [n, H] -> [n, H]."""
MoeFn = Callable[[torch.Tensor, torch.Tensor, int, bool], torch.Tensor]
"""A layer's experts: (x [T, H], router_logits [T, E], top_k, renormalize) -> [T, H]; see `moe_mlp`."""
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": silu_and_mul, "gelu_pytorch_tanh": gelu_tanh_and_mul}


def route(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """router_logits [T, E] -> shares float32 [T, top_k] and expert ids int64 [T, top_k], ids ascending in each row.

    A softmax over all experts in float32, then the top_k largest; of equal ones the lower id (torch.topk promises no order). renormalize:
    the shares taken are divided by their sum. A row's result does not depend on the other rows: the sum of the few columns is written out,
    since a library may add short rows in another order when there are more of them.
    """
    probs, ids = torch.softmax(router_logits.float(), -1).sort(dim=-1, descending=True, stable=True)
    shares, ids = probs[:, :top_k], ids[:, :top_k]
    if renormalize:
        total = shares[:, 0].clone()
        for j in range(1, top_k):
            total += shares[:, j]
        shares = shares / total[:, None]
    ids, order = ids.sort(dim=-1)
    return shares.gather(-1, order), ids


def moe_mlp(x: torch.Tensor, router_logits: torch.Tensor, experts: Sequence[ExpertFn], top_k: int, renormalize: bool) -> torch.Tensor:
    """x [T, H] -> sum over the token's experts of share * expert(x) [T, H]; see `route`.

    Experts are added in the order of their ids, in float32; the sum is rounded once to the dtype of x.
    """
    shares, ids = route(router_logits, top_k, renormalize)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert_id, expert in enumerate(experts):
        tokens, slots = (ids == expert_id).nonzero(as_tuple=True)
        if tokens.numel():
            out[tokens] += expert(x[tokens]).float() * shares[tokens, slots, None]
    return out.to(x.dtype)


def make_grouped_experts(gate_up: ExpertWeights, down: ExpertWeights, activation: str, facts: KernelFacts) -> MoeFn:
    """`moe_mlp` of experts x -> down(activation(gate_up(x))) whose weights stand side by side. activation: see ModelConfig.hidden_act."""
    experts = [
        _gated(_linear(gate_up.expert(index), facts), ACTIVATIONS[activation], _linear(down.expert(index), facts))
        for index in range(gate_up.num_experts)
    ]
    return lambda x, router_logits, top_k, renormalize: moe_mlp(x, router_logits, experts, top_k, renormalize)


def _gated(gate_up: ExpertFn, activation: ExpertFn, down: ExpertFn) -> ExpertFn:
    return lambda x: down(activation(gate_up(x)))


def _linear(weight: Any, facts: KernelFacts) -> ExpertFn:
    if isinstance(weight, torch.Tensor):
        return linear.make_dense_linear(weight, None, facts)
    if isinstance(weight, Wna16Weight):
        return linear.make_wna16_linear(weight, None, facts)
    return linear.make_fp8_linear(weight, None, facts) if isinstance(weight, Fp8Weight) else linear.make_int8_linear(weight, None, facts)
