"""What is worth measuring beside a tile: its neighbours that can be launched, a bounded list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dspark.kernels.triton.attention_plan import LEAST_SPLIT_KEYS, AttentionShape
from dspark.kernels.triton.gemm_tiles import GemmTile
from dspark.kernels.triton.tuning.choices import AttentionChoice
from dspark.kernels.triton.tuning.keys import ProductKind
from dspark.kernels.triton.tuning.legal import why_no_attention, why_no_product
from dspark.kernels.triton.tuning.limits import DeviceLimits

MOST_CANDIDATES = 24
MOST_SPLIT_ROWS = 256
"""Products of more rows have programs enough."""


def product_candidates(kind: ProductKind, num_rows: int, limits: DeviceLimits, tile: GemmTile) -> list[GemmTile]:
    """Tiles around one that can be launched for so many rows on such a device, likely gains first."""
    found: list[GemmTile] = []
    for other in _product_moves(tile, num_rows):
        if other != tile and other not in found and why_no_product(kind, other, num_rows, limits) is None:
            found.append(other)
    return found[:MOST_CANDIDATES]


def _product_moves(tile: GemmTile, num_rows: int) -> Iterator[GemmTile]:
    """One size at a time, and pairs that leave the number of programs, or of bytes under way, as it is."""
    splits, stages, warps = tile.splits, tile.stages, tile.warps
    fewer = max(splits // 2, 1)
    if num_rows <= MOST_SPLIT_ROWS:
        yield replace(tile, splits=2 * splits)
        yield replace(tile, splits=fewer)
        yield replace(tile, splits=splits + 1)
        yield replace(tile, cols=2 * tile.cols, splits=2 * splits)
    for deeper in (stages + 1, stages - 1, stages + 2, stages - 2):
        yield replace(tile, stages=deeper)
    yield replace(tile, cols=2 * tile.cols)
    yield replace(tile, cols=2 * tile.cols, warps=2 * warps)
    yield replace(tile, cols=2 * tile.cols, depth=tile.depth // 2)
    yield replace(tile, cols=tile.cols // 2, splits=fewer)
    yield replace(tile, cols=tile.cols // 2)
    yield replace(tile, cols=tile.cols // 2, warps=warps // 2)
    yield replace(tile, depth=2 * tile.depth, stages=stages // 2 + 1)
    yield replace(tile, depth=2 * tile.depth)
    yield replace(tile, depth=tile.depth // 2)
    yield replace(tile, depth=tile.depth // 2, stages=2 * stages - 1)
    yield replace(tile, warps=2 * warps)
    yield replace(tile, warps=warps // 2)
    if num_rows > tile.rows:
        yield replace(tile, rows=2 * tile.rows)
        yield replace(tile, rows=2 * tile.rows, warps=2 * warps)
    yield replace(tile, rows=tile.rows // 2)
    yield replace(tile, rows=tile.rows // 2, cols=2 * tile.cols)
    yield replace(tile, row_group=2 * tile.row_group)
    yield replace(tile, row_group=max(tile.row_group // 2, 1))


def attention_candidates(shape: AttentionShape, limits: DeviceLimits, choice: AttentionChoice) -> list[AttentionChoice]:
    """The same for an attention step."""
    found: list[AttentionChoice] = []
    for other in _attention_moves(shape, choice):
        if other != choice and other not in found and why_no_attention(shape, other, limits) is None:
            found.append(other)
    return found[:MOST_CANDIDATES]


def _attention_moves(shape: AttentionShape, choice: AttentionChoice) -> Iterator[AttentionChoice]:
    tile, split = choice.tile, choice.split_keys
    for keys in (split // 2, 2 * split, 0) if split else (_half(shape.max_context_len, tile.keys),):
        if not keys or keys >= LEAST_SPLIT_KEYS:
            yield AttentionChoice(tile, keys)
    for stages in (tile.stages + 1, tile.stages - 1):
        yield AttentionChoice(replace(tile, stages=stages), split)
    for warps in (2 * tile.warps, tile.warps // 2):
        yield AttentionChoice(replace(tile, warps=warps), split)
    for keys in (2 * tile.keys, tile.keys // 2):
        whole = -(-split // keys) * keys if keys else 0
        yield AttentionChoice(replace(tile, keys=keys), whole)
        yield AttentionChoice(replace(tile, keys=keys, stages=tile.stages + (1 if keys < tile.keys else -1)), whole)
        yield AttentionChoice(replace(tile, keys=keys, warps=2 * tile.warps if keys > tile.keys else tile.warps // 2), whole)
    if shape.max_query_len > 1:
        for rows in (2 * tile.rows, tile.rows // 2):
            yield AttentionChoice(replace(tile, rows=rows), split)
            yield AttentionChoice(replace(tile, rows=rows, warps=2 * tile.warps if rows > tile.rows else tile.warps // 2), split)


def _half(context: int, key_tile: int) -> int:
    """Half of a context, in whole key tiles."""
    return -(-context // 2 // key_tile) * key_tile
