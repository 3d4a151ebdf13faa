"""Which tiles can be launched at all, and which would not fit a device. Estimates err towards room: what they let through nearly always
compiles, and a launch that fails for lack of room is caught where candidates are measured.

A tile that comes from a file is held against the same rules before it is launched.
"""

from __future__ import annotations

from dspark.kernels.triton.attention_plan import AttentionShape, can_split
from dspark.kernels.triton.gemm_tiles import MAX_SPLITS, MOST_SUM_BYTES, GemmTile
from dspark.kernels.triton.tiles import AttentionTile, next_power_of_two
from dspark.kernels.triton.tuning.choices import AttentionChoice
from dspark.kernels.triton.tuning.keys import ProductKind
from dspark.kernels.triton.tuning.limits import DeviceLimits

REGISTERS = 255
OTHER_REGISTERS = 40
"""What a thread holds besides operands and sums: pointers, masks, counters."""
LEAST_DOT = 16
"""Rows, columns and K step of a `tl.dot`; 8-bit numbers on both sides want a K step of 32."""
MOST_FLOAT32_SUMS = 64 * 64
"""float32 products are plain multiply-adds, which hold their operands in registers: a larger tile spills."""


def why_no_product(kind: ProductKind, tile: GemmTile, num_rows: int, limits: DeviceLimits) -> str | None:
    """Why a tile cannot be launched for so many rows, or None."""
    sizes = (tile.rows, tile.cols, tile.depth, tile.warps)
    if any(size < 1 or size & (size - 1) for size in sizes):
        return "sizes are no powers of two"
    if tile.rows < LEAST_DOT or tile.cols < LEAST_DOT or tile.depth < (2 * LEAST_DOT if kind.itemsize == 1 else LEAST_DOT):
        return "is smaller than a matrix instruction"
    if tile.warps > 16 or not 1 <= tile.stages <= 10 or not 1 <= tile.row_group <= 64:
        return "has warps, stages or a group of rows that no kernel has"
    if kind.step and kind.step % tile.depth:
        return f"a K step of {tile.depth} does not divide {kind.step}"
    if (reason := _why_no_splits(kind, tile, num_rows)) is not None:
        return reason
    if kind.itemsize == 4 and tile.rows * tile.cols > MOST_FLOAT32_SUMS:
        return "would spill"
    if (needed := product_shared_bytes(kind, tile, limits)) > limits.shared_bytes:
        return f"needs about {needed} bytes of shared memory, a block has {limits.shared_bytes}"
    return "would spill" if product_registers(kind, tile) > REGISTERS else None


def _why_no_splits(kind: ProductKind, tile: GemmTile, num_rows: int) -> str | None:
    if tile.splits == 1:
        return None
    if kind.num_experts:
        return "products of experts are not split"
    steps = -(-kind.in_features // tile.depth)
    if not 1 <= tile.splits <= min(MAX_SPLITS, steps):
        return f"{tile.splits} splits of {steps} K steps"
    sums = 4 * tile.splits * num_rows * kind.out_features
    return f"splits would leave {sums} bytes of sums" if sums > MOST_SUM_BYTES else None


def product_shared_bytes(kind: ProductKind, tile: GemmTile, limits: DeviceLimits) -> int:
    """Shared memory at most: each stage holds a step of both operands; numbers that are widened pass through it, on Hopper twice."""
    stage = tile.rows * tile.depth * kind.itemsize + tile.cols * tile.depth * kind.weight_bits // 8
    widened = tile.cols * tile.depth * kind.itemsize if kind.widens else 0
    return tile.stages * stage + widened * (2 if limits.capability >= (9, 0) else 1)


def product_registers(kind: ProductKind, tile: GemmTile) -> int:
    """Registers a thread, about: sums (two where blocks have scales of their own), and what is widened on its way."""
    threads = 32 * tile.warps
    sums = tile.rows * tile.cols // threads * (2 if "blocks" in kind.storage else 1)
    widened = 3 * tile.cols * tile.depth // threads // 2 if kind.widens else 0
    return sums + widened + OTHER_REGISTERS


def why_no_attention(shape: AttentionShape, choice: AttentionChoice, limits: DeviceLimits) -> str | None:
    """Why a step cannot be launched so, or None."""
    tile = choice.tile
    if any(size < 1 or size & (size - 1) for size in (tile.rows, tile.keys, tile.warps)):
        return "sizes are no powers of two"
    if tile.rows < max(LEAST_DOT, next_power_of_two(shape.group)) or tile.keys < LEAST_DOT:
        return "is smaller than a matrix instruction, or than the heads that share keys"
    if tile.warps > 16 or not 1 <= tile.stages <= 6:
        return "has warps or stages that no kernel has"
    if choice.split_keys < 0 or not can_split(shape, tile, choice.split_keys):
        return f"contexts cannot be shared by {choice.split_keys} keys"
    if shape.itemsize == 4 and tile.rows * max(tile.keys, shape.block_d) > MOST_FLOAT32_SUMS:
        return "would spill"
    if (needed := attention_shared_bytes(shape, tile, limits)) > limits.shared_bytes:
        return f"needs about {needed} bytes of shared memory, a block has {limits.shared_bytes}"
    return "would spill" if attention_registers(shape, tile) > REGISTERS else None


def attention_shared_bytes(shape: AttentionShape, tile: AttentionTile, limits: DeviceLimits) -> int:
    """Shared memory at most: queries, weights, and keys and values of all stages but one, on Hopper of all."""
    pages = 2 * tile.keys * shape.block_d * (1 if shape.coded else shape.itemsize)
    held = tile.rows * (shape.block_d + tile.keys) * shape.itemsize
    widened = tile.keys * shape.block_d * shape.itemsize if shape.coded else 0
    return pages * max(tile.stages - (limits.capability < (9, 0)), 1) + held + widened


def attention_registers(shape: AttentionShape, tile: AttentionTile) -> int:
    """Registers a thread, about: sums of values, scores with the weights made of them, and what is widened on its way."""
    threads = 32 * tile.warps
    widened = tile.keys * shape.block_d // threads if shape.coded else 0
    return (tile.rows * shape.block_d + tile.rows * tile.keys * 3 // 2) // threads + widened + OTHER_REGISTERS
