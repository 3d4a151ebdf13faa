"""Mixture of experts, grouped: tokens sorted by expert, one call of each expert that any token takes, results put back in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dspark.kernels.cpu.rows import empty_rows
from dspark.kernels.reference.moe import ExpertFn, route


def moe_mlp(x: torch.Tensor, router_logits: torch.Tensor, experts: Sequence[ExpertFn], top_k: int, renormalize: bool) -> torch.Tensor:
    """See `kernels.reference.moe`. An expert that no token takes is not called.

    The rows of an expert's call are those of all tokens of the step that take it; what each row gets is for the linears to keep apart from
    its neighbours (they do in deterministic runs). Each token then adds up its own experts, lower id first, whatever the batch is.
    """
    num_tokens, width = x.shape
    shares, ids = route(router_logits, top_k, renormalize)
    taken = ids.flatten()
    by_expert = taken.argsort(stable=True)  # pairs (token, choice), of one expert side by side and its tokens in order
    rows = empty_rows(num_tokens * top_k, width, x.dtype)
    torch.index_select(x, 0, by_expert // top_k, out=rows)
    results = torch.empty_like(rows)
    start = 0
    for expert, count in zip(experts, torch.bincount(taken, minlength=len(experts)).tolist(), strict=True):
        if count:
            results[start : start + count] = expert(rows[start : start + count])
        start += count
    place = torch.empty_like(by_expert)
    place[by_expert] = torch.arange(len(by_expert))
    place = place.view(num_tokens, top_k)
    total = results[place[:, 0]].float() * shares[:, :1]
    for choice in range(1, top_k):
        total += results[place[:, choice]].float() * shares[:, choice : choice + 1]
    return total.to(x.dtype)
