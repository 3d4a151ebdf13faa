"""The form of a shipped table: rules that name a tile for a range of shapes, with the reasoning, until somebody measures.

A rule holds for what its kernel can take, on any card of its capability: programs are counted by multiprocessor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dspark.kernels.triton.attention_plan import AttentionShape, reasoned_tile
from dspark.kernels.triton.gemm_tiles import GemmTile, spread
from dspark.kernels.triton.tiles import AttentionTile
from dspark.kernels.triton.tuning.keys import ProductKind
from dspark.kernels.triton.tuning.limits import DeviceLimits


@dataclass(frozen=True)
class ProductRule:
    """kernels: names of `ProductKind.kernel`. rows: from, to. weight_bits: of the stored weight, None for any. per_multiprocessor: programs
    that K is split for, 0 for none. For linears with inputs of 16 bits or codes; experts, whose loads vary, keep the reasoned tile."""

    kernels: tuple[str, ...]
    rows: tuple[int, int]
    tile: GemmTile
    per_multiprocessor: float
    why: str
    weight_bits: int | None = None
    outputs: tuple[int, int] = (1, 1 << 30)
    measured: bool = False

    def tile_for(self, kind: ProductKind, num_rows: int, limits: DeviceLimits) -> GemmTile | None:
        """The tile for so many rows, None where the rule does not speak of them."""
        if kind.kernel not in self.kernels or kind.num_experts or kind.itemsize > 2 or (kind.step and kind.step % self.tile.depth):
            return None
        if not self.rows[0] <= num_rows <= self.rows[1] or not self.outputs[0] <= kind.out_features <= self.outputs[1]:
            return None
        if self.weight_bits not in (None, kind.weight_bits):
            return None
        programs = int(self.per_multiprocessor * limits.multiprocessors)
        return spread(self.tile, num_rows, kind.out_features, kind.in_features, programs) if programs else self.tile


@dataclass(frozen=True)
class AttentionRule:
    """block_d: head_dim as a power of two. queries: of the longest sequence, from, to. changes to the reasoned tile: None keeps its."""

    block_d: tuple[int, ...]
    queries: tuple[int, int]
    cache: tuple[str, ...]
    why: str
    keys: int | None = None
    warps: int | None = None
    stages: int | None = None
    measured: bool = False

    def tile_for(self, shape: AttentionShape) -> AttentionTile | None:
        """The tile for a step, None where the rule does not speak of it."""
        if shape.itemsize > 2 or shape.block_d not in self.block_d or shape.cache not in self.cache or shape.has_tree:
            return None
        if not self.queries[0] <= shape.max_query_len <= self.queries[1]:
            return None
        changes = {"keys": self.keys, "warps": self.warps, "stages": self.stages}
        return replace(reasoned_tile(shape), **{name: value for name, value in changes.items() if value is not None})


@dataclass(frozen=True)
class ShippedTable:
    """name: of the cards that it was thought out for. The first rule that speaks of a shape holds; no rule repeats the reasoned tile."""

    name: str
    products: Sequence[ProductRule] = ()
    attention: Sequence[AttentionRule] = ()

    @property
    def measured(self) -> bool:
        """Whether every rule was measured on such a card."""
        return all(rule.measured for rule in self.products) and all(rule.measured for rule in self.attention)

    def product_tile(self, kind: ProductKind, num_rows: int, limits: DeviceLimits) -> GemmTile | None:
        """What the table says of a product."""
        return next((tile for rule in self.products if (tile := rule.tile_for(kind, num_rows, limits)) is not None), None)

    def attention_tile(self, shape: AttentionShape) -> AttentionTile | None:
        """What the table says of an attention step."""
        return next((tile for rule in self.attention if (tile := rule.tile_for(shape)) is not None), None)
