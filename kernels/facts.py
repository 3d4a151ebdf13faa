"""What a kernel candidate may ask before it accepts an op: facts that hold for the whole run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dspark.kernels.triton.tuning.book import TileBook


@dataclass(frozen=True)
class KernelFacts:
    """device: "cpu" or "cuda". interpreted: Triton kernels run under Triton's interpreter, on CPU tensors.

    deterministic: every row's arithmetic must not depend on the other rows of the batch. weight_shadow: a dense copy of quantized
    weights may be kept for large batches. exact_activations: layers that quantize their inputs leave
    them as they are (to compare weights). cache_dtype: of the KV cache where it is an 8-bit one (see `kernels.kv_cache`), None for dtype.
    tiles: where GPU kernels ask for the sizes they launch with (see `kernels.triton.tuning`), None for those by shape alone.
    The rest is the model's and the cache's shape.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    deterministic: bool = False
    weight_shadow: bool = False
    interpreted: bool = False
    exact_activations: bool = False
    cache_dtype: torch.dtype | None = None
    tiles: TileBook | None = field(default=None, compare=False, repr=False)

    @property
    def kv_dtype(self) -> torch.dtype:
        """What the KV cache holds."""
        return self.dtype if self.cache_dtype is None else self.cache_dtype

    @property
    def query_group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads
