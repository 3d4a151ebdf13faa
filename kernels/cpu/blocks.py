"""The inner loops of matrix products, as LLVM code: rows of activations times blocks of 32 outputs, of 8-bit integers or bfloat16.

Activations are rows of `row_bytes`. Weights are panels of 16 outputs, `[N / 16, K / 4, 16, 4]` for int8 and `[N / 16, K / 2, 16, 2]` for
bfloat16: 64 bytes hold four (two) inputs of 16 outputs, which is both one row of an AMX tile and one operand of a dot-product instruction.
Two panels are a block. A step is 64 bytes of a row: one tile of each. All offsets are in bytes.

int8      sums int32, exact (neither instruction saturates). AMX takes signed activations; VNNI takes unsigned ones, code + 128, and its
          sums are too big by 128 * sum of the weights.
bfloat16  sums float32; each instruction adds a row's products in an order of its own, which does not depend on other rows.

A block's weights come from memory, the activations from the cache: while one block is computed, the next one's lines are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import intrinsic

from dspark.kernels.cpu.llvm import (
    BFLOAT,
    I8,
    LINE_BYTES,
    WORDS,
    Loop,
    all_lanes,
    bytes_at,
    call,
    constant,
    has_instructions,
    load,
    prefetch_line,
)
from dspark.kernels.cpu.simd import I32, I64, LANES, VECTOR

BLOCK_OUTPUTS = 2 * LANES
STEP_BYTES = 64
TILE_BYTES = 1024
AMX_ROWS = 32
DOT_ROWS = 8
ROW_OF_SUMS = 4 * BLOCK_OUTPUTS
SUMS_BYTES = AMX_ROWS * ROW_OF_SUMS
NOTHING_AHEAD = -1
_X, _WEIGHT, _SUMS = 0, 4, 9  # places of the arrays among a block's arguments


@dataclass(frozen=True)
class Product:
    """One kind of product. sums: 16 of them. operand: what the dot-product instruction takes of 64 bytes."""

    tile_instruction: str
    dot_instruction: str
    operand: ir.Type
    sums: ir.Type


# LLVM 22 gives the operands of the integer dot product as bytes, earlier ones as 32-bit words
_BYTE_OPERAND = ir.VectorType(I8, 4 * LANES) if binding.llvm_version_info >= (22, 0, 0) else WORDS
INT8 = Product("llvm.x86.tdpbssd", "llvm.x86.avx512.vpdpbusd.512", _BYTE_OPERAND, WORDS)
BF16 = Product("llvm.x86.tdpbf16ps", "llvm.x86.avx512bf16.dpbf16ps.512", ir.VectorType(BFLOAT, 2 * LANES), VECTOR)


def has_int8_tiles() -> bool:
    """Whether this CPU has AMX for 8-bit integers and the system lets this process use it."""
    return has_instructions("amx_int8", "amx-int8") and bool(torch.cpu._init_amx())


def has_bf16_tiles() -> bool:
    """The same for bfloat16."""
    return has_instructions("amx_bf16", "amx-bf16") and bool(torch.cpu._init_amx())


def has_int8_dots() -> bool:
    """Whether this CPU has AVX-512 VNNI."""
    return has_instructions("avx512_vnni", "avx512vnni")


def has_bf16_dots() -> bool:
    """Whether this CPU has AVX-512 BF16."""
    return has_instructions("avx512_bf16", "avx512bf16")


def tile_shapes() -> np.ndarray:
    """The operand of `configure_tiles`: eight tiles of 16 rows of 64 bytes (Intel's palette 1)."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32:2] = LINE_BYTES
    config[48:56] = LANES
    return config


@intrinsic
def configure_tiles(typingctx, shapes):
    """Give this thread's tiles their shapes. Every use ends with `release_tiles`."""

    def codegen(context, builder, sig, args):
        call(builder, "llvm.x86.ldtilecfg", [bytes_at(context, builder, sig.args[0], args[0], I64(0))])
        return context.get_dummy_value()

    return types.void(shapes), codegen


@intrinsic
def release_tiles(typingctx):
    """The tiles are empty again: the system need not save them when it switches threads."""

    def codegen(context, builder, sig, args):
        call(builder, "llvm.x86.tilerelease", [])
        return context.get_dummy_value()

    return types.void(), codegen


def block_signature(x, weight, sums):
    """(x, its offset, row_bytes, steps; weight, its offset, panel_bytes, offset of what to ask for; carry; sums, their offset)

    carry: 1 adds to the sums, 0 begins new ones.
    """
    integer = types.int64
    return types.void(x, integer, integer, integer, weight, integer, integer, integer, integer, sums, integer)


def block_bases(context, builder, sig, args):
    """Pointers to the first byte of x, of the weights, of what to ask for and of the sums."""
    offsets = ((_X, args[1]), (_WEIGHT, args[5]), (_WEIGHT, args[7]), (_SUMS, args[10]))
    return [builder.gep(bytes_at(context, builder, sig.args[place], args[place], I64(0)), [offset]) for place, offset in offsets]


def _amx_intrinsic(product: Product, row_tiles: int, lines: int):
    """16 * row_tiles rows times one block. lines: of each of the next block's tiles that are asked for."""

    @intrinsic
    def amx_block(typingctx, x, x_offset, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset):
        def codegen(context, builder, sig, args):
            row_bytes, num_steps, panel_bytes, carry = args[2], args[3], args[6], args[8]
            x_base, weight_base, ahead_base, sums_base = block_bases(context, builder, sig, args)
            totals = [[I8(2 * i + j) for j in range(2)] for i in range(row_tiles)]
            places = [
                (totals[i][j], builder.gep(sums_base, [I64(4 * (i * LANES * BLOCK_OUTPUTS + j * LANES))]))
                for i in range(row_tiles)
                for j in range(2)
            ]
            x_tiles, weight_tiles = [I8(4), I8(5)][:row_tiles], [I8(6), I8(7)]
            with builder.if_else(builder.icmp_signed("!=", carry, I64(0))) as (go_on, begin):
                with go_on:
                    for tile, place in places:
                        call(builder, "llvm.x86.tileloadd64", [tile, place, I64(ROW_OF_SUMS)])
                with begin:
                    for tile, _ in places:
                        call(builder, "llvm.x86.tilezero", [tile])
            loop = Loop(builder, num_steps)
            column, step = builder.mul(loop.index, I64(STEP_BYTES)), builder.mul(loop.index, I64(TILE_BYTES))
            for i, tile in enumerate(x_tiles):
                start = builder.add(column, builder.mul(row_bytes, I64(LANES * i)))
                call(builder, "llvm.x86.tileloadd64", [tile, builder.gep(x_base, [start]), row_bytes])
            for j, weight_tile in enumerate(weight_tiles):
                start = builder.add(step, builder.mul(panel_bytes, I64(j)))
                call(builder, "llvm.x86.tileloadd64", [weight_tile, builder.gep(weight_base, [start]), I64(LINE_BYTES)])
                for i, tile in enumerate(x_tiles):
                    call(builder, product.tile_instruction, [totals[i][j], tile, weight_tile])
                for line in range(lines):
                    prefetch_line(builder, ahead_base, builder.add(start, I64(LINE_BYTES * line)))
            loop.close()
            for tile, place in places:
                call(builder, "llvm.x86.tilestored64", [tile, place, I64(ROW_OF_SUMS)])
            return context.get_dummy_value()

        return block_signature(x, weight, sums), codegen

    return amx_block


def _dot_intrinsic(product: Product, num_rows: int, lines: int):
    """num_rows rows times one block. lines: 1 asks for the next block's lines, 0 does not."""

    @intrinsic
    def dot_block(typingctx, x, x_offset, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset):
        def codegen(context, builder, sig, args):
            row_bytes, num_steps, panel_bytes, carry = args[2], args[3], args[6], args[8]
            x_base, weight_base, ahead_base, sums_base = block_bases(context, builder, sig, args)
            x_rows = [builder.gep(x_base, [builder.mul(row_bytes, I64(r))]) for r in range(num_rows)]
            places = [
                builder.bitcast(builder.gep(sums_base, [I64(LINE_BYTES * index)]), product.sums.as_pointer())
                for index in range(2 * num_rows)
            ]
            zero, goes_on = constant(product.sums, 0), builder.icmp_signed("!=", carry, I64(0))
            before = [builder.select(goes_on, builder.load(place, align=LINE_BYTES), zero) for place in places]
            loop = Loop(builder, builder.mul(num_steps, I64(STEP_BYTES // 4)), before)
            step, column = builder.mul(loop.index, I64(LINE_BYTES)), builder.mul(loop.index, I64(4))
            starts = [builder.add(step, builder.mul(panel_bytes, I64(j))) for j in range(2)]
            panels = [load(builder, builder.gep(weight_base, [start]), product.operand) for start in starts]
            new = []
            for r, row in enumerate(x_rows):
                word = builder.load(builder.bitcast(builder.gep(row, [column]), I32.as_pointer()), align=4)
                spread = builder.bitcast(all_lanes(builder, word), product.operand)
                for j, panel in enumerate(panels):
                    new.append(call(builder, product.dot_instruction, [loop.values[2 * r + j], spread, panel], product.sums))
            for start in starts[: 2 * lines]:
                prefetch_line(builder, ahead_base, start, level=2)
            loop.close(new)
            for place, total in zip(places, new, strict=True):
                builder.store(total, place, align=LINE_BYTES)
            return context.get_dummy_value()

        return block_signature(x, weight, sums), codegen

    return dot_block


def amx_rows(product: Product) -> Callable[..., Any]:
    """The compiled function (row, num_rows, x, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset): up to
    32 rows from `row` on times the block at `offset`. x has rows up to a multiple of 16. ahead: offset of the next block,
    NOTHING_AHEAD where the weights are in the cache."""
    all_32, half_32, none_32 = (_amx_intrinsic(product, 2, lines) for lines in (16, 8, 0))
    all_16, half_16, none_16 = (_amx_intrinsic(product, 1, lines) for lines in (16, 8, 0))

    @njit
    def multiply(row, num_rows, x, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset):
        start = row * row_bytes
        half = ahead + row // AMX_ROWS * (TILE_BYTES // 2)
        if num_rows - row > LANES:
            if ahead == NOTHING_AHEAD:
                none_32(x, start, row_bytes, num_steps, weight, offset, panel_bytes, offset, carry, sums, sums_offset)
            elif num_rows <= AMX_ROWS:
                all_32(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)
            elif row <= AMX_ROWS:
                half_32(x, start, row_bytes, num_steps, weight, offset, panel_bytes, half, carry, sums, sums_offset)
            else:
                none_32(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)
        elif ahead == NOTHING_AHEAD:
            none_16(x, start, row_bytes, num_steps, weight, offset, panel_bytes, offset, carry, sums, sums_offset)
        elif row == 0:
            all_16(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)
        elif row == AMX_ROWS:
            half_16(x, start, row_bytes, num_steps, weight, offset, panel_bytes, half, carry, sums, sums_offset)
        else:
            none_16(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)

    return multiply


def dot_rows(product: Product) -> Callable[..., Any]:
    """The same with dot products, up to 8 rows at a time; x needs no rows beyond num_rows."""
    one, two, four = (_dot_intrinsic(product, rows, 1) for rows in (1, 2, 4))
    eight, eight_none = _dot_intrinsic(product, 8, 1), _dot_intrinsic(product, 8, 0)

    @njit
    def multiply(row, num_rows, x, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset):
        start, left = row * row_bytes, num_rows - row
        if ahead == NOTHING_AHEAD:
            ahead = offset
        if left >= DOT_ROWS and row:
            eight_none(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)
        elif left >= DOT_ROWS:
            eight(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)
        else:
            if left & 4:
                four(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)
                start, sums_offset = start + 4 * row_bytes, sums_offset + 4 * ROW_OF_SUMS
            if left & 2:
                two(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)
                start, sums_offset = start + 2 * row_bytes, sums_offset + 2 * ROW_OF_SUMS
            if left & 1:
                one(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)

    return multiply


amx_int8, dot_int8 = amx_rows(INT8), dot_rows(INT8)
amx_bf16, dot_bf16 = amx_rows(BF16), dot_rows(BF16)
