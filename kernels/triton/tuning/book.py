"""The one place that products and attention ask for a tile: measured on this machine, else shipped for its kind of GPU, else reasoned.

A run's `KernelFacts` carry its book. What was looked up once is remembered, so that a launch pays for a dictionary's answer.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from dspark.kernels.triton import attention_plan, gemm_tiles
from dspark.kernels.triton.attention_plan import AttentionPlan, AttentionShape
from dspark.kernels.triton.gemm_tiles import GemmTile
from dspark.kernels.triton.tuning.choices import AttentionChoice, Tuned
from dspark.kernels.triton.tuning.keys import ProductKind, attention_kind, product_key
from dspark.kernels.triton.tuning.legal import why_no_attention, why_no_product
from dspark.kernels.triton.tuning.limits import DeviceLimits
from dspark.kernels.triton.tuning.rules import ShippedTable

if TYPE_CHECKING:
    from dspark.kernels.facts import KernelFacts

SOURCES = ("tuned", "shipped", "reasoned")
MOST_PLANS = 4096
"""Remembered plans of attention; contexts grow, so those of a long run are many."""


class TunableProduct(Protocol):
    """A product whose tile can be measured. weight_bytes: what one multiplication reads of it."""

    weight_bytes: int

    def sample(self, num_rows: int) -> Any:
        """Random inputs of so many rows (of experts: so many rows for each on the average)."""

    def multiply(self, inputs: Any, tile: GemmTile) -> Any:
        """What the product makes of them with a tile."""


class ProductTiles(dict[int, GemmTile]):
    """Number of rows -> tile, of one kind of product; asked for when it is first met."""

    def __init__(self, kind: ProductKind, choose: Callable[[ProductKind, int], GemmTile]) -> None:
        super().__init__()
        self.kind = kind
        self._choose = choose

    def __missing__(self, num_rows: int) -> GemmTile:
        tile = self[num_rows] = self._choose(self.kind, num_rows)
        return tile


def reasoned_product(kind: ProductKind, num_rows: int) -> GemmTile:
    """The tile by shape alone."""
    inputs = 0 if kind.num_experts else kind.in_features  # products of experts are not split
    if kind.itemsize == 1:
        return gemm_tiles.bytes_tile(num_rows, kind.out_features, inputs, kind.depth, kind.fixed)
    return gemm_tiles.wna16_tile(num_rows, kind.out_features, inputs, kind.depth, kind.itemsize, kind.fixed)


class TileBook:
    """limits: of the device, None where there is none to tune for: then all tiles are reasoned. shipped: the table of such devices.
    tuned: what was measured, by key. cache: where that is kept, as text; problem: why it is not, or None."""

    def __init__(
        self,
        limits: DeviceLimits | None = None,
        shipped: ShippedTable | None = None,
        tuned: Mapping[str, Tuned] | None = None,
        cache: str | None = None,
        problem: str | None = None,
    ) -> None:
        self.limits, self.shipped, self.cache, self.problem = limits, shipped, cache, problem
        self.tuned: dict[str, Tuned] = dict(tuned or {})
        self.refused: dict[str, str] = {}
        """Key -> why what the cache says of it is not taken."""
        self._products: dict[ProductKind, ProductTiles] = {}
        self._owners: dict[ProductKind, list[weakref.ref[Any]]] = {}
        self._plans: dict[AttentionShape, AttentionPlan] = {}
        self._sources: dict[str, tuple[str, str]] = {}

    def products(self, kind: ProductKind, owner: TunableProduct | None = None) -> ProductTiles:
        """The tiles of a kind of product. owner: one that takes them, which the tuner may run; it is not kept alive."""
        if owner is not None:
            there = [ref for ref in self._owners.get(kind, []) if ref() is not None]
            self._owners[kind] = [*there, weakref.ref(owner)]
        if kind not in self._products:
            self._products[kind] = ProductTiles(kind, self._product_tile)
        return self._products[kind]

    def owners(self) -> dict[ProductKind, list[Any]]:
        """Kind -> products that are still there."""
        found = {kind: [owner for ref in refs if (owner := ref()) is not None] for kind, refs in self._owners.items()}
        return {kind: owners for kind, owners in found.items() if owners}

    def untuned_product(self, kind: ProductKind, num_rows: int) -> tuple[GemmTile, str]:
        """(tile, source) without what was measured here."""
        reasoned = reasoned_product(kind, num_rows)
        if self.limits is None or self.shipped is None or kind.fixed:
            return reasoned, "reasoned"
        tile = self.shipped.product_tile(kind, num_rows, self.limits)
        if tile is None or tile == reasoned or why_no_product(kind, tile, num_rows, self.limits) is not None:
            return reasoned, "reasoned"
        return tile, "shipped"

    def _product_tile(self, kind: ProductKind, num_rows: int) -> GemmTile:
        key = product_key(kind, num_rows)
        tuned = None if self.limits is None or kind.fixed else self.tuned.get(key)
        if tuned is not None and self.limits is not None:
            reason = "is no tile of a product"
            if isinstance(tuned.choice, GemmTile):
                reason = why_no_product(kind, tuned.choice, num_rows, self.limits) or ""
                if not reason:
                    self._sources[key] = kind.name, "tuned"
                    return tuned.choice
            self.refused[key] = reason
        tile, source = self.untuned_product(kind, num_rows)
        self._sources[key] = kind.name, source
        return tile

    def attention(self, shape: AttentionShape) -> AttentionPlan:
        """How a step is launched."""
        plan = self._plans.get(shape)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[shape] = self._attention_plan(shape)
        return plan

    def untuned_attention(self, shape: AttentionShape) -> tuple[AttentionPlan, str]:
        """(plan, source) without what was measured here."""
        reasoned = attention_plan.plan(shape)
        if self.limits is None or self.shipped is None:
            return reasoned, "reasoned"
        tile = self.shipped.attention_tile(shape)
        if tile is None or tile == reasoned.tile:
            return reasoned, "reasoned"
        plan = attention_plan.plan(shape, None, tile)
        fits = why_no_attention(shape, AttentionChoice(tile, plan.split_keys), self.limits) is None
        return (plan, "shipped") if fits else (reasoned, "reasoned")

    def _attention_plan(self, shape: AttentionShape) -> AttentionPlan:
        name, key = "paged_attention", str(attention_kind(shape)) + (" tree" if shape.has_tree else "")  # trees are not measured
        tuned = None if self.limits is None else self.tuned.get(key)
        if tuned is not None and self.limits is not None:
            if isinstance(tuned.choice, AttentionChoice):
                tile, split_keys = tuned.choice.tile, tuned.choice.split_keys
                fits = attention_plan.can_split(shape, tile, split_keys)
                plan = attention_plan.plan(shape, split_keys if fits else None, tile)
                reason = why_no_attention(shape, AttentionChoice(tile, plan.split_keys), self.limits)
                if reason is None:
                    self._sources[key] = name, "tuned"
                    return plan
                self.refused[key] = reason
            else:
                self.refused[key] = "is no tile of attention"
        plan, source = self.untuned_attention(shape)
        self._sources[key] = name, source
        return plan

    def learn(self, entries: Mapping[str, Tuned]) -> None:
        """Take what was measured from now on. What was chosen before is forgotten; launches under way keep their tiles."""
        self.tuned.update(entries)
        self._plans.clear()
        self._sources.clear()
        self.refused.clear()
        for tiles in self._products.values():
            tiles.clear()

    def counts(self) -> dict[str, dict[str, int]]:
        """Kernel -> how many of the shapes met so far (rows, sequences and contexts in buckets) have a tile of which source."""
        found: dict[str, Counter[str]] = {}
        for name, source in self._sources.values():
            found.setdefault(name, Counter())[source] += 1
        return {name: {source: counter[source] for source in SOURCES} for name, counter in sorted(found.items())}

    def metrics(self) -> dict[str, Any]:
        """What the tiles of a run come from, JSON-ready."""
        table = None if self.shipped is None else {"name": self.shipped.name, "measured": self.shipped.measured}
        return {
            "shapes": self.counts(),
            "shipped_table": table,
            "cache": self.cache,
            "problem": self.problem,
            "refused": dict(self.refused),
        }


def book_of(facts: KernelFacts) -> TileBook:
    """The run's book, an empty one where it has none."""
    return TileBook() if facts.tiles is None else facts.tiles
