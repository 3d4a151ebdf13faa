"""The inner loops of products of 8-bit integers, as LLVM code: blocks of 32 outputs, on AMX tiles or with AVX-512 VNNI.

Activations are bytes, rows of `row_bytes` (a multiple of 64); weights are panels of 16 outputs, int8 `[N / 16, K / 4, 16, 4]`: 64 bytes
hold four inputs of 16 outputs, which is both one row of an AMX tile and one VNNI operand. Both add up exactly in 32 bits (neither
saturates). AMX takes signed activations. VNNI takes unsigned ones, code + 128: its sums are too big by 128 * sum of w.

A block's weights come from memory, the activations from the cache: while one block is computed, the next one's lines are asked for.
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from dspark.kernels.cpu.int8_rows import BLOCK_OUTPUTS
from dspark.kernels.cpu.llvm import I8, LINE_BYTES, WORDS, Loop, all_lanes, bytes_at, call, constant, has_instructions, load, prefetch_line
from dspark.kernels.cpu.simd import I32, I64, LANES

INPUT_STEP = 64
"""Inputs of one AMX tile; rows and panels are filled up to multiples of it."""
AMX_ROWS = 32
VNNI_ROWS = 8
TILE_BYTES = 1024
# LLVM 22 gives the operands of the dot product as bytes, earlier ones as 32-bit words
_OPERAND = ir.VectorType(I8, 4 * LANES) if binding.llvm_version_info >= (22, 0, 0) else WORDS


def has_vnni() -> bool:
    """Whether this CPU has AVX-512 VNNI."""
    return has_instructions("avx512_vnni", "avx512vnni")


def has_amx() -> bool:
    """Whether this CPU has AMX for 8-bit integers and the system lets this process use it."""
    return has_instructions("amx_int8", "amx-int8") and bool(torch.cpu._init_amx())


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


def _amx_intrinsic(row_tiles: int, lines: int):
    """sums[0 : 16 * row_tiles, 0:32] = rows of x times one block. lines: of each of the next block's tiles that are asked for."""

    @intrinsic
    def amx_block(typingctx, x, x_offset, row_bytes, weight, offset, panel_bytes, num_steps, ahead, sums, sums_offset):
        integer = types.int64
        signature = types.void(x, integer, integer, weight, integer, integer, integer, integer, sums, integer)

        def codegen(context, builder, sig, args):
            x_v, x_off, row_b, weight_v, off, panel_b, steps, ahead_v, sums_v, sums_off = args
            x_base = bytes_at(context, builder, sig.args[0], x_v, x_off)
            weight_base = bytes_at(context, builder, sig.args[3], weight_v, off)
            ahead_base = bytes_at(context, builder, sig.args[3], weight_v, ahead_v)
            totals = [[I8(2 * i + j) for j in range(2)] for i in range(row_tiles)]
            x_tiles, weight_tiles = [I8(4), I8(5)][:row_tiles], [I8(6), I8(7)]
            for tile in (tile for row in totals for tile in row):
                call(builder, "llvm.x86.tilezero", [tile])
            loop = Loop(builder, steps)
            column, step = builder.mul(loop.index, I64(INPUT_STEP)), builder.mul(loop.index, I64(TILE_BYTES))
            for i, tile in enumerate(x_tiles):
                start = builder.add(column, builder.mul(row_b, I64(LANES * i)))
                call(builder, "llvm.x86.tileloadd64", [tile, builder.gep(x_base, [start]), row_b])
            for j, weight_tile in enumerate(weight_tiles):
                start = builder.add(step, builder.mul(panel_b, I64(j)))
                call(builder, "llvm.x86.tileloadd64", [weight_tile, builder.gep(weight_base, [start]), I64(LINE_BYTES)])
                for i, tile in enumerate(x_tiles):
                    call(builder, "llvm.x86.tdpbssd", [totals[i][j], tile, weight_tile])
                for line in range(lines):
                    prefetch_line(builder, ahead_base, builder.add(start, I64(LINE_BYTES * line)))
            loop.close()
            sums_base = bytes_at(context, builder, sig.args[8], sums_v, sums_off)
            for i in range(row_tiles):
                for j in range(2):
                    start = I64(4 * (i * LANES * BLOCK_OUTPUTS + j * LANES))
                    arguments = [totals[i][j], builder.gep(sums_base, [start]), I64(4 * BLOCK_OUTPUTS)]
                    call(builder, "llvm.x86.tilestored64", arguments)
            return context.get_dummy_value()

        return signature, codegen

    return amx_block


def _vnni_intrinsic(num_rows: int, lines: int):
    """sums[0 : num_rows, 0:32] = rows of x times one block. lines: 1 asks for the next block's lines, 0 does not."""

    @intrinsic
    def vnni_block(typingctx, x, x_offset, row_bytes, weight, offset, panel_bytes, num_steps, ahead, sums, sums_offset):
        integer = types.int64
        signature = types.void(x, integer, integer, weight, integer, integer, integer, integer, sums, integer)

        def codegen(context, builder, sig, args):
            x_v, x_off, row_b, weight_v, off, panel_b, steps, ahead_v, sums_v, sums_off = args
            x_rows = [bytes_at(context, builder, sig.args[0], x_v, builder.add(x_off, builder.mul(row_b, I64(r)))) for r in range(num_rows)]
            weight_base = bytes_at(context, builder, sig.args[3], weight_v, off)
            ahead_base = bytes_at(context, builder, sig.args[3], weight_v, ahead_v)
            rounds = builder.mul(steps, I64(INPUT_STEP // 4))
            loop = Loop(builder, rounds, [constant(WORDS, 0)] * (2 * num_rows))
            step, column = builder.mul(loop.index, I64(LINE_BYTES)), builder.mul(loop.index, I64(4))
            starts = [builder.add(step, builder.mul(panel_b, I64(j))) for j in range(2)]
            panels = [load(builder, builder.gep(weight_base, [start]), _OPERAND) for start in starts]
            new = []
            for r, row in enumerate(x_rows):
                four = builder.load(builder.bitcast(builder.gep(row, [column]), I32.as_pointer()), align=4)
                spread = builder.bitcast(all_lanes(builder, four), _OPERAND)
                for j, panel in enumerate(panels):
                    arguments = [loop.values[2 * r + j], spread, panel]
                    new.append(call(builder, "llvm.x86.avx512.vpdpbusd.512", arguments, WORDS))
            for start in starts[: 2 * lines]:
                prefetch_line(builder, ahead_base, start)
            loop.close(new)
            sums_base = bytes_at(context, builder, sig.args[8], sums_v, sums_off)
            for index, total in enumerate(new):
                pointer = builder.gep(sums_base, [I64(LINE_BYTES * index)])
                builder.store(total, builder.bitcast(pointer, WORDS.as_pointer()), align=LINE_BYTES)
            return context.get_dummy_value()

        return signature, codegen

    return vnni_block


amx_32_all, amx_32_half, amx_32_none = (_amx_intrinsic(2, lines) for lines in (16, 8, 0))
amx_16_all, amx_16_half, amx_16_none = (_amx_intrinsic(1, lines) for lines in (16, 8, 0))
vnni_1, vnni_2, vnni_4 = (_vnni_intrinsic(rows, 1) for rows in (1, 2, 4))
vnni_8, vnni_8_none = _vnni_intrinsic(8, 1), _vnni_intrinsic(8, 0)
