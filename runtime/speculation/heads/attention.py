"""Attention of a drafter's layers: keys and values of the context and of the rows of a pass, and rows that see all of both."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark.kernels.ops import AttentionBatch, Kernels, LinearFn
from dspark.runtime.layers.linear import load_linear
from dspark.runtime.layers.weights import WeightSource
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.speculation.heads.pages import DraftPass, LayerCache

MAX_FOLDED_HEADS = 64
"""Query heads of one key/value head in a call: what a GPU's tile of rows holds without spilling."""


@dataclass
class DraftAttention:
    """q_norm, k_norm: factors of a norm over each head [D], None without. The keys and values have a projection of their own, since the
    context needs no queries."""

    q_proj: LinearFn
    kv_proj: LinearFn
    o_proj: LinearFn
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    num_heads: int
    num_kv_heads: int
    scale: float
    kernels: Kernels

    def store(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> None:
        """Write the keys and values of x [T, inputs] into the cache, nothing else."""
        self.kernels.rope_store_kv(self.kv_proj(x), cos, sin, self.k_norm, self.k_norm, self.eps, *cache, slots, 0)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """q, k and v side by side [T, (num_heads + 2 * num_kv_heads) * D]."""
        return torch.cat([self.q_proj(x), self.kv_proj(x)], -1)

    def rotate_and_store(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: LayerCache, slots: torch.Tensor
    ) -> torch.Tensor:
        """Keys and values into the cache; returns the queries [T, num_heads, D]. qkv may be overwritten."""
        return self.kernels.rope_store_kv(qkv, cos, sin, self.q_norm, self.k_norm, self.eps, *cache, slots, self.num_heads)

    def see_all(self, q: torch.Tensor, cache: LayerCache, rows: DraftPass) -> torch.Tensor:
        """Queries of a pass [S * rows, num_heads, D] over the context and over all rows of their own sequence, later ones too
        -> [S * rows, num_heads * D].

        The kernel is causal; a query at the end sees everything. So the rows of a sequence are folded into the heads of one query there:
        rows times the heads that share a key/value head. Keys and values are then read once for all rows.
        """
        count, head_dim = rows.rows, q.shape[-1]
        group = self.num_heads // self.num_kv_heads
        fold = folded_rows(count, group)
        folded = q.reshape(-1, fold, self.num_kv_heads, group, head_dim).transpose(1, 2).reshape(-1, self.num_heads * fold, head_dim)
        lens = (rows.starts + count).to(torch.int32)
        batch = rows.attention(lens, rows.max_start + count, count // fold)
        out = self.attend(folded, cache, batch)
        return out.reshape(-1, self.num_kv_heads, fold, group, head_dim).transpose(1, 2).reshape(-1, self.num_heads * head_dim)

    def attend(self, q: torch.Tensor, cache: LayerCache, batch: AttentionBatch) -> torch.Tensor:
        """Queries [T, heads, D], any multiple of num_kv_heads, over the pages -> [T, heads * D]."""
        return self.kernels.paged_attention(q, *cache, batch, self.scale, None)


def folded_rows(rows: int, group: int) -> int:
    """The most rows, a divisor of all of them, that one call takes as heads."""
    return next(fold for fold in range(rows, 0, -1) if rows % fold == 0 and (fold == 1 or fold * group <= MAX_FOLDED_HEADS))


def load_draft_attention(name: str, config: ModelConfig, weights: WeightSource, kernels: Kernels) -> DraftAttention:
    """The attention whose modules stand below `name`."""
    norms = [weights.take(f"{name}.{which}_norm.weight") for which in "qk"] if config.qk_norm else [None, None]
    return DraftAttention(
        q_proj=load_linear([f"{name}.q_proj"], weights, None, kernels),
        kv_proj=load_linear([f"{name}.k_proj", f"{name}.v_proj"], weights, None, kernels),
        o_proj=load_linear([f"{name}.o_proj"], weights, None, kernels),
        q_norm=norms[0],
        k_norm=norms[1],
        eps=config.rms_norm_eps,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        scale=config.head_dim**-0.5,
        kernels=kernels,
    )
