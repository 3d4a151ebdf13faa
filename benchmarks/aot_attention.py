"""The attention steps of `aot.py`: decode, verify and prefill, with windows, soft-caps, draft trees and 8-bit caches.

Also contexts that programs share, and the deterministic form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dspark.kernels.batch import AttentionBatch, TreeMask
from dspark.kernels.kv_cache import KVScales
from dspark.kernels.triton import attention
from dspark.kernels.triton.tuning.book import TileBook

CACHE_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Step:
    """sequences of as many queries each. tree: whether the last 15 queries of each are a draft tree; then there must be 16."""

    sequences: int
    queries: int
    window: int | None = None
    softcap: float = 0.0
    cache: str = ""
    tree: bool = False
    context: int = 4096

    def __str__(self) -> str:
        named = (f"S={self.sequences} n={self.queries}", "window" if self.window else "", "softcap" if self.softcap else "")
        return " ".join(filter(None, (*named, "tree" if self.tree else "", self.cache)))


WHOLE = (
    Step(64, 1),
    Step(64, 1, 4096, 50.0),
    Step(64, 4),
    Step(8, 512),
    Step(8, 512, 4096, 50.0),
    Step(64, 16, tree=True),
    Step(8, 512, 4096, 50.0, tree=True),
    *(Step(sequences, queries, cache=kind) for kind in CACHE_TYPES for sequences, queries in ((64, 1), (64, 4), (8, 512))),
    Step(64, 16, cache="int8", tree=True),
)
"""Enough sequences to fill a GPU."""
SHARED = (
    Step(1, 1),
    Step(1, 1, 4096, 50.0),
    Step(1, 4),
    Step(1, 16, tree=True),
    Step(1, 1, cache="int8"),
    Step(1, 1, cache="fp8"),
)
"""Lone sequences: a long context is shared among programs."""
DETERMINISTIC = (
    Step(64, 1, context=500),
    Step(1, 1),
    Step(8, 512, 4096, 50.0),
    Step(1, 16, tree=True),
    Step(8, 512, cache="int8"),
    Step(8, 512, cache="fp8"),
)


def attention_runs(
    name: str, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, tiles: TileBook
) -> Iterator[tuple[Callable[[], Any], str]]:
    """What to record, and its label."""
    own = heads, kv_heads, head_dim, dtype
    for step in (*WHOLE, *SHARED):
        yield partial(_attend, partial(attention.paged_attention, tiles_of_run=tiles), step, *own), f"{name} {step}"
    for step in DETERMINISTIC:
        yield partial(_attend, attention.deterministic_paged_attention, step, *own), f"{name} deterministic {step}"


def _attend(function: Callable[..., Any], step: Step, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    def meta(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    total = step.sequences * step.queries
    ints = meta(step.sequences + 1, of=torch.int32), meta(step.sequences, of=torch.int32), meta(step.sequences, 256, of=torch.int32)
    slots = meta(total, of=torch.int64)
    tree = TreeMask(slots, meta(step.sequences, of=torch.int32)) if step.tree else None
    batch = AttentionBatch(*ints, slots, slots, step.queries, step.context, tree)
    pages = meta(1000, kv_heads, 16, head_dim, of=CACHE_TYPES.get(step.cache, dtype))
    scales = KVScales(meta(kv_heads, head_dim, of=torch.float32), meta(kv_heads, head_dim, of=torch.float32)) if step.cache else None
    function(meta(total, heads, head_dim), pages, pages, batch, head_dim**-0.5, step.window, step.softcap, scales)
