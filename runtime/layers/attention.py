"""Grouped-query attention over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark.kernels.ops import AttentionBatch, Kernels, LinearFn


@dataclass
class Attention:
    """qkv projection -> (q/k norm) -> rope -> cache -> attention; o_proj is the caller's, which may want fewer rows of it.

    window: see ModelConfig.sliding_window.
    """

    qkv_proj: LinearFn
    o_proj: LinearFn
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    num_heads: int
    scale: float
    window: int | None
    kernels: Kernels

    def __call__(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """x [T, H] -> heads side by side [T, num_heads * head_dim]; stores this step's keys and values in the layer's cache."""
        k_cache, v_cache = cache
        q = self.kernels.rope_store_kv(
            self.qkv_proj(x), cos, sin, self.q_norm, self.k_norm, self.eps, k_cache, v_cache, batch.slot_mapping, self.num_heads
        )
        return self.kernels.paged_attention(q, k_cache, v_cache, batch, self.scale, self.window)
