"""Grouped-query attention over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark.kernels.ops import AttentionBatch, InputFormat, Kernels, KVScales, LinearFn, Rows, input_format
from dspark.runtime.layers.weights import WeightSource
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.kv_cache import scale_names
from dspark.runtime.spec.model_config import ModelConfig


@dataclass
class Attention:
    """qkv projection -> (q/k norm) -> rope -> cache -> attention; o_proj is the caller's, which may want fewer rows of it.

    q_norm, k_norm: factors of a norm over each head [D]. full_width_norms: factors of a norm over all heads of q [num_heads * D] and over
    all of k, or None. window: see ModelConfig.sliding_window. softcap: see ModelConfig, 0 for none.
    kv_scales: of an 8-bit cache, None for a cache of the model's dtype.
    """

    qkv_proj: LinearFn
    o_proj: LinearFn
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    full_width_norms: tuple[torch.Tensor, torch.Tensor] | None
    eps: float
    num_heads: int
    scale: float
    window: int | None
    softcap: float
    kernels: Kernels
    kv_scales: KVScales | None = None

    @property
    def takes(self) -> InputFormat | None:
        """See `input_format`."""
        return input_format(self.qkv_proj)

    def __call__(
        self,
        x: Rows,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """x [T, H] -> heads side by side [T, num_heads * head_dim]; stores this step's keys and values in the layer's cache."""
        k_cache, v_cache = cache
        qkv = self.qkv_proj(x)
        if self.full_width_norms is not None:
            self._norm_full_width(qkv, *self.full_width_norms)
        q = self.kernels.rope_store_kv(
            qkv, cos, sin, self.q_norm, self.k_norm, self.eps, k_cache, v_cache, batch.slot_mapping, self.num_heads, self.kv_scales
        )
        return self.kernels.paged_attention(q, k_cache, v_cache, batch, self.scale, self.window, self.softcap, self.kv_scales)

    def _norm_full_width(self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor) -> None:
        """Norm q and k in place."""
        q_width, k_width = q_norm.shape[0], k_norm.shape[0]
        for columns, weight in ((slice(0, q_width), q_norm), (slice(q_width, q_width + k_width), k_norm)):
            part = qkv[:, columns]
            part.copy_(self.kernels.rms_norm(part.contiguous(), weight, self.eps))


def load_kv_scales(config: ModelConfig, layer: int, weights: WeightSource, kernels: Kernels) -> KVScales | None:
    """One layer's scales where the run's cache is an 8-bit one. They are taken where the engine has them, needed or not.

    Raises InputError when they are needed and absent, of another shape, or not positive numbers.
    """
    names = scale_names(layer)
    scales = [weights.take(name) for name in names if name in weights]
    if kernels.facts.cache_dtype is None:
        return None
    shape = (config.num_kv_heads, config.head_dim)
    if len(scales) != 2 or any(tuple(scale.shape) != shape or not bool((scale > 0).all() and scale.isfinite().all()) for scale in scales):
        what = f"an 8-bit KV cache needs {names[0]} and {names[1]}, positive numbers {list(shape)}, which the engine does not have"
        raise InputError(what, "quantize again with --kv-cache-dtype, or type --kv-cache-dtype model")
    return KVScales(scales[0].contiguous(), scales[1].contiguous())
