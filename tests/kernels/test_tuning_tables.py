"""Every tile of the shipped tables, and every candidate around one, can be launched on its device; no rule repeats the reasoned tile."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from dspark.kernels.triton.attention_plan import AttentionShape, plan
from dspark.kernels.triton.gemm_tiles import GemmTile
from dspark.kernels.triton.int8 import int8_kind
from dspark.kernels.triton.tuning.book import TileBook, reasoned_product
from dspark.kernels.triton.tuning.candidates import MOST_CANDIDATES, attention_candidates, product_candidates
from dspark.kernels.triton.tuning.choices import AttentionChoice
from dspark.kernels.triton.tuning.keys import ROW_BUCKETS, ProductKind
from dspark.kernels.triton.tuning.legal import why_no_attention, why_no_product
from dspark.kernels.triton.tuning.limits import CARDS, DeviceLimits
from dspark.kernels.triton.tuning.rules import ShippedTable
from dspark.kernels.triton.tuning.tables import TABLES, table_for

SIZES = ((4096, 14336), (28672, 4096), (6144, 4096), (4096, 4096), (2560, 9728), (576, 1536), (1, 64))
ROWS = (*ROW_BUCKETS, 17, 33, 65, 200, 257, 5000)


def kinds() -> Iterator[ProductKind]:
    """Every form of weight that the kernels take."""
    for (outputs, inputs), dtype in product(SIZES, ("bfloat16", "float32")):
        size = 2 if dtype == "bfloat16" else 4
        for bits, group in product((4, 8), (0, 32, 64, 128)):
            depth = 64 if not group else min(group, 64)
            yield ProductKind("wna16", f"{bits} bits, groups of {group}", outputs, inputs, dtype, size, bits, depth, group)
        for blocks in (0, 128):
            storage = f"blocks of {blocks}" if blocks else "channels"
            yield ProductKind("fp8 widened", storage, outputs, inputs, dtype, size, 8, 64, blocks)
            yield ProductKind("fp8", storage, outputs, inputs, dtype, 1, 8, 128, blocks)
        yield int8_kind(outputs, inputs, torch.bfloat16)
        yield int8_kind(outputs, inputs, torch.bfloat16, 64, "gather")
        yield ProductKind("dense", "gather", outputs, inputs, dtype, size, 8 * size, 64, num_experts=64)


def shapes(limits: DeviceLimits) -> Iterator[AttentionShape]:
    for block_d, (queries, sequences), cache, window in product(
        (64, 128, 256), ((1, 1), (1, 64), (5, 8), (64, 4), (512, 8)), ("number", "int8", "fp8"), (None, 1000)
    ):
        for group, itemsize in ((1, 2), (4, 2), (8, 2), (4, 4)):
            yield AttentionShape(
                sequences * queries, sequences, queries, 4096, 8, group, block_d, itemsize, cache, window, False, limits.multiprocessors
            )


def cards() -> list[Any]:
    return [pytest.param(card, id=name) for name, card in CARDS.items()]


@pytest.mark.parametrize("card", cards())
def test_every_shipped_tile_can_be_launched(card: DeviceLimits) -> None:
    table = table_for(card)
    assert table is not None
    taken = 0
    for kind, rows in product(kinds(), ROWS):
        tile = table.product_tile(kind, rows, card)
        if tile is not None:
            taken += 1
            assert why_no_product(kind, tile, rows, card) is None, (kind, rows, tile)
    assert taken > 100
    for shape in shapes(card):
        tile = table.attention_tile(shape)
        if tile is not None:
            assert why_no_attention(shape, AttentionChoice(tile, plan(shape, None, tile).split_keys), card) is None, (shape, tile)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_rule_says_something_new_and_why(table: ShippedTable) -> None:
    (card, *_) = [card for card in CARDS.values() if table_for(card) is table]
    for rule in table.products:
        found = ((rule.tile_for(kind, rows, card), kind, rows) for kind, rows in product(kinds(), ROWS))
        assert any(tile is not None and tile != reasoned_product(kind, rows) for tile, kind, rows in found), rule
    for attention_rule in table.attention:
        told = ((attention_rule.tile_for(shape), shape) for shape in shapes(card))
        assert any(tile is not None and tile != plan(shape).tile for tile, shape in told), attention_rule
    assert all(len(rule.why) > 20 for rule in (*table.products, *table.attention))


def test_nothing_is_called_measured_that_was_not() -> None:
    """No GPU has run any of it so far. Whoever measures a rule marks it, with the figures in docs/kernels.md."""
    assert not [rule for table in TABLES for rule in (*table.products, *table.attention) if rule.measured]
    assert not any(table.measured for table in TABLES)


@pytest.mark.parametrize("card", cards())
def test_reasoned_tiles_can_be_launched(card: DeviceLimits) -> None:
    """Guards the rules themselves: a rule that refuses what is known to compile would hide candidates."""
    for kind, rows in product(kinds(), ROWS):
        tile = reasoned_product(kind, rows)
        assert why_no_product(kind, tile, rows, card) is None, (kind, rows, tile)
    refused = [shape for shape in shapes(card) if why_no_attention(shape, AttentionChoice(plan(shape).tile, plan(shape).split_keys), card)]
    assert not [shape for shape in refused if shape.itemsize == 2]


@pytest.mark.parametrize("card", cards())
def test_candidates_are_few_different_and_can_be_launched(card: DeviceLimits) -> None:
    book = TileBook(card, table_for(card))
    for kind, rows in product(kinds(), (1, 32, 128, 2048)):
        tile = book.untuned_product(kind, rows)[0]
        found = product_candidates(kind, rows, card, tile)
        assert 2 <= len(found) <= MOST_CANDIDATES and len({*found, tile}) == len(found) + 1, (kind, rows)
        for other in found:
            assert other.depth >= (32 if kind.itemsize == 1 else 16) and other.rows >= 16 and other.cols >= 16
            assert not kind.step or kind.step % other.depth == 0
            assert other.splits == 1 or (not kind.num_experts and rows <= 256)
    for shape in shapes(card):
        around = book.untuned_attention(shape)[0]
        choices = attention_candidates(shape, card, AttentionChoice(around.tile, around.split_keys))
        assert len(choices) <= MOST_CANDIDATES and all(choice.split_keys % choice.tile.keys == 0 for choice in choices)
        assert shape.itemsize == 4 or len(choices) >= 2, shape


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (GemmTile(16, 64, 64, 4, 6, splits=16), "splits"),
        (GemmTile(128, 256, 64, 8, 6), "shared memory"),
        (GemmTile(128, 128, 64, 2, 2), "spill"),
        (GemmTile(8, 64, 64, 4, 3), "matrix instruction"),
        (GemmTile(16, 96, 64, 4, 3), "powers of two"),
        (GemmTile(16, 64, 256, 4, 3), "does not divide 128"),
        (GemmTile(16, 64, 64, 4, 40), "stages"),
    ],
    ids=str,
)
def test_what_cannot_be_launched_is_known(tile: GemmTile, reason: str) -> None:
    kind = ProductKind("wna16", "8 bits, groups of 128", 4096, 14336, "bfloat16", 2, 8, 64, 128)
    assert reason in (why_no_product(kind, tile, 32, CARDS["l40s"]) or "nothing")
