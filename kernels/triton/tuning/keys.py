"""What a tile is looked up by: the kernel with what it is compiled for, the sizes of the weight or the heads, and a bucket of the load.

A key's text stands in the cache file: a change of these texts forgets what was measured, and nothing worse.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from dspark.kernels.triton.attention_plan import AttentionShape

ROW_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 2048)
SEQUENCE_BUCKETS = (1, 4, 16, 64, 256)
QUERY_BUCKETS = (1, 8, 64, 512)
CONTEXT_BUCKETS = (512, 2048, 8192, 32768, 131072)


def bucket(count: int, bounds: tuple[int, ...]) -> int:
    """The least bound that is not below a count; the last one for all beyond."""
    return bounds[min(bisect_left(bounds, count), len(bounds) - 1)]


@dataclass(frozen=True)
class ProductKind:
    """A matrix product without its rows: what all layers of a kind share.

    kernel: "wna16", "fp8", "fp8 widened", "int8" or "dense". storage: what else the kernel is compiled for. dtype: of the results.
    itemsize: bytes of a number of x as it is multiplied; weight_bits: of the weight as it is stored. depth: the largest K step of the
    reasoned tile; step: what any K step must divide, 0 for anything. num_experts: 0 for a linear. fixed: the same tile whatever the load
    (a deterministic run, where sums are rounded).
    """

    kernel: str
    storage: str
    out_features: int
    in_features: int
    dtype: str
    itemsize: int
    weight_bits: int
    depth: int
    step: int = 0
    num_experts: int = 0
    fixed: bool = False

    @property
    def name(self) -> str:
        """The kernel's name in metrics."""
        return f"experts {self.kernel}" if self.num_experts else self.kernel

    @property
    def widens(self) -> bool:
        """Whether stored numbers become those of x in registers, and go through shared memory once more."""
        return self.weight_bits != 8 * self.itemsize or self.kernel == "fp8 widened"

    @property
    def exact(self) -> bool:
        """Whether every tile gives the same bits."""
        return self.kernel == "int8"


def product_key(kind: ProductKind, num_rows: int) -> str:
    """num_rows: of x; of experts, the mean number of an expert's rows."""
    experts = f" of {kind.num_experts} experts" if kind.num_experts else ""
    shape = f"{kind.out_features}x{kind.in_features}{experts}"
    return f"{kind.kernel} ({kind.storage}) {kind.dtype} {shape} rows {bucket(num_rows, ROW_BUCKETS)}"


@dataclass(frozen=True)
class AttentionKind:
    """An attention step without its exact sizes. queries: 1 takes the decode kernel."""

    itemsize: int
    cache: str
    group: int
    num_kv_heads: int
    block_d: int
    windowed: bool
    sequences: int
    queries: int
    context: int

    def __str__(self) -> str:
        heads = f"{self.num_kv_heads}x{self.group} heads of {self.block_d}"
        load = f"sequences {self.sequences} queries {self.queries} context {self.context}"
        return f"attention ({self.cache} cache{', window' if self.windowed else ''}) {8 * self.itemsize} bits {heads} {load}"


def attention_kind(shape: AttentionShape) -> AttentionKind:
    """A window bounds the context that counts."""
    context = min(shape.max_context_len, shape.window) if shape.window else shape.max_context_len
    return AttentionKind(
        shape.itemsize,
        shape.cache,
        shape.group,
        shape.num_kv_heads,
        shape.block_d,
        bool(shape.window),
        bucket(shape.num_sequences, SEQUENCE_BUCKETS),
        bucket(shape.max_query_len, QUERY_BUCKETS),
        bucket(context, CONTEXT_BUCKETS),
    )
