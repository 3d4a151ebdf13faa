"""The inner loops of `blocks` for CPUs with AVX2 and neither matrix tiles nor dot products of 8-bit integers or bfloat16.

Weights lie as they do there, and blocks, steps and sums mean the same; x does not:

bfloat16  x is float32. A line of weights, two inputs of 16 outputs, is widened by a shift and a mask, and both are multiplied and added in
          float32, one input after the other: each sum is of the same order for any number of rows.
codes     of 4 and 8 bits (`wna16.PanelWeight`) are widened to such lines, a piece at a time.
int8      x is int16, four inputs a, b, c, d as a, c, b, d: a line of weights, four inputs of 16 outputs, falls into even and odd bytes, and
          each pair of products is added exactly, in 32 bits.

Six rows times 16 outputs are 12 of the 16 registers; one and two rows take both panels of a block, to have more sums under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from dspark.kernels.cpu.blocks import NOTHING_AHEAD, ROW_OF_SUMS, STEP_BYTES, block_bases, block_signature
from dspark.kernels.cpu.llvm import (
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
    rounded_bf16,
)
from dspark.kernels.cpu.simd import I16, I32, I64, LANES, VECTOR, element_pointer

FLOAT_ROWS, INTEGER_ROWS = 6, 4
"""Rows at a time of each kind."""
_HALF_WORDS, _HALF_SHORTS = ir.VectorType(I32, LANES // 2), ir.VectorType(I16, LANES)
_BYTES = ir.VectorType(I8, LANES)
_UPPER = -(1 << 16)


def has_wide_floats() -> bool:
    """Whether this CPU has AVX2 and fused multiply-adds."""
    return has_instructions("avx2", "avx2") and has_instructions("fma3", "fma")


def _block_intrinsic(emit: Callable[..., None]):
    """The compiled function that `emit` writes the code of, see `block_signature`; emit is given the builder, the bases of `block_bases`,
    row_bytes, the number of rounds of a line of weights each, panel_bytes, and whether sums go on."""

    @intrinsic
    def block(typingctx, x, x_offset, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset):
        def codegen(context, builder, sig, args):
            rounds = builder.mul(args[3], I64(STEP_BYTES // 4))
            goes_on = builder.icmp_signed("!=", args[8], I64(0))
            emit(builder, *block_bases(context, builder, sig, args), args[2], rounds, args[6], goes_on)
            return context.get_dummy_value()

        return block_signature(x, weight, sums), codegen

    return block


def _float_intrinsic(num_rows: int, num_panels: int, lines: int):
    """num_rows rows times one block of bfloat16, num_panels of its two at a time. lines: 1 asks for the next block's lines, 0 does not."""

    def emit(builder, x_base, weight_base, ahead_base, sums_base, row_bytes, rounds, panel_bytes, goes_on):
        x_rows = [builder.gep(x_base, [builder.mul(row_bytes, I64(r))]) for r in range(num_rows)]
        for panels in [range(j, j + num_panels) for j in range(0, 2, num_panels)]:
            places = _places(builder, sums_base, num_rows, panels, VECTOR)
            before = [builder.select(goes_on, builder.load(place, align=LINE_BYTES), constant(VECTOR, 0)) for place in places]
            loop = Loop(builder, rounds, before)
            starts, column = _line_starts(builder, loop.index, panel_bytes, panels), builder.mul(loop.index, I64(8))
            words = [load(builder, builder.gep(weight_base, [start]), WORDS) for start in starts]
            first = [builder.bitcast(builder.shl(word, constant(WORDS, 16)), VECTOR) for word in words]
            second = [builder.bitcast(builder.and_(word, constant(WORDS, _UPPER)), VECTOR) for word in words]
            new = list(loop.values)
            for place, weights in ((column, first), (builder.add(column, I64(4)), second)):
                for r, row in enumerate(x_rows):
                    spread = builder.bitcast(all_lanes(builder, _word(builder, row, place)), VECTOR)
                    for i, panel in enumerate(weights):
                        index = r * len(weights) + i
                        new[index] = call(builder, "llvm.fma.v16f32", [spread, panel, new[index]], VECTOR)
            for start in starts[: len(starts) * lines]:
                prefetch_line(builder, ahead_base, start)
            loop.close(new)
            for place, total in zip(places, new, strict=True):
                builder.store(total, place, align=LINE_BYTES)

    return _block_intrinsic(emit)


def _integer_intrinsic(num_rows: int, num_panels: int, lines: int):
    """The same with 8-bit integers."""
    zero, eight, half_line = constant(_HALF_WORDS, 0), constant(_HALF_SHORTS, 8), LINE_BYTES // 2

    def emit(builder, x_base, weight_base, ahead_base, sums_base, row_bytes, rounds, panel_bytes, goes_on):
        x_rows = [builder.gep(x_base, [builder.mul(row_bytes, I64(r))]) for r in range(num_rows)]
        for panels in [range(j, j + num_panels) for j in range(0, 2, num_panels)]:
            halves = [
                builder.gep(builder.bitcast(place, _HALF_WORDS.as_pointer()), [I64(half)])
                for place in _places(builder, sums_base, num_rows, panels, WORDS)
                for half in range(2)
            ]
            before = [builder.select(goes_on, builder.load(place, align=half_line), zero) for place in halves]
            loop = Loop(builder, rounds, before)
            starts, column = _line_starts(builder, loop.index, panel_bytes, panels), builder.mul(loop.index, I64(8))
            places = [builder.add(start, I64(half_line * half)) for start in starts for half in range(2)]
            pieces = [load(builder, builder.gep(weight_base, [place]), _HALF_SHORTS) for place in places]
            even = [builder.ashr(builder.shl(piece, eight), eight) for piece in pieces]
            odd = [builder.ashr(piece, eight) for piece in pieces]
            new = list(loop.values)
            for place, weights in ((column, even), (builder.add(column, I64(4)), odd)):
                for r, row in enumerate(x_rows):
                    spread = builder.bitcast(_eight_lanes(builder, _word(builder, row, place)), _HALF_SHORTS)
                    for i, piece in enumerate(weights):
                        index = r * len(weights) + i
                        products = call(builder, "llvm.x86.avx2.pmadd.wd", [spread, piece], _HALF_WORDS)
                        new[index] = builder.add(new[index], products)
            for start in starts[: len(starts) * lines]:
                prefetch_line(builder, ahead_base, start)
            loop.close(new)
            for place, total in zip(halves, new, strict=True):
                builder.store(total, place, align=half_line)

    return _block_intrinsic(emit)


def _widen_intrinsic(bits: int):
    """target = pairs of inputs of 16 outputs, rounded to bfloat16, of codes that share scales and zeros: (code - zero) * scale."""

    @intrinsic
    def widen_pairs(typingctx, codes, offset, num_pairs, scales, zeros, first, target, target_offset):
        integer = types.int64
        signature = types.void(codes, integer, integer, scales, zeros, integer, target, integer)

        def codegen(context, builder, sig, args):
            codes_v, off, count, scales_v, zeros_v, first_v, target_v, target_off = args
            base = bytes_at(context, builder, sig.args[0], codes_v, off)
            out = bytes_at(context, builder, sig.args[6], target_v, target_off)
            scale = load(builder, element_pointer(context, builder, sig.args[3], scales_v, first_v), VECTOR)
            zero = load(builder, element_pointer(context, builder, sig.args[4], zeros_v, first_v), VECTOR)
            loop = Loop(builder, count)
            at = builder.gep(base, [builder.mul(loop.index, I64(LANES * bits // 4))])
            if bits == 4:
                raw = builder.zext(load(builder, at, _BYTES), WORDS)
                pair = [builder.and_(raw, constant(WORDS, 15)), builder.lshr(raw, constant(WORDS, 4))]
            else:
                pair = [builder.zext(load(builder, builder.gep(at, [I64(LANES * k)]), _BYTES), WORDS) for k in range(2)]
            halves = []
            for word in pair:
                value = builder.fmul(builder.fsub(builder.sitofp(word, VECTOR), zero), scale)
                halves.append(builder.zext(rounded_bf16(builder, value), WORDS))
            line = builder.or_(halves[0], builder.shl(halves[1], constant(WORDS, 16)))
            place = builder.gep(out, [builder.mul(loop.index, I64(LINE_BYTES))])
            builder.store(line, builder.bitcast(place, WORDS.as_pointer()), align=1)
            loop.close()
            return context.get_dummy_value()

        return signature, codegen

    return widen_pairs


def _places(builder, sums_base, num_rows: int, panels: range, vector: ir.Type) -> list[Any]:
    """Where each row's sums of these panels lie, row after row."""
    return [
        builder.bitcast(builder.gep(sums_base, [I64(LINE_BYTES * (2 * r + j))]), vector.as_pointer())
        for r in range(num_rows)
        for j in panels
    ]


def _line_starts(builder, index, panel_bytes, panels: range) -> list[Any]:
    """Where line `index` of each of these panels begins."""
    step = builder.mul(index, I64(LINE_BYTES))
    return [builder.add(step, builder.mul(panel_bytes, I64(j))) for j in panels]


def _word(builder, row, place):
    """The 32 bits at a place of a row of x."""
    return builder.load(builder.bitcast(builder.gep(row, [place]), I32.as_pointer()), align=4)


def _eight_lanes(builder, word):
    undefined = ir.Constant(_HALF_WORDS, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, word, I32(0)), undefined, ir.Constant(_HALF_WORDS, [0] * (LANES // 2)))


def _float_rows() -> Callable[..., Any]:
    """As `blocks.dot_rows`, up to 6 rows at a time. Three and five rows are computed as four and six, which is faster: x has one row more
    than num_rows, and sums have room for it."""
    one, two, four = _float_intrinsic(1, 2, 1), _float_intrinsic(2, 2, 1), _float_intrinsic(4, 1, 1)
    six, six_none = _float_intrinsic(6, 1, 1), _float_intrinsic(6, 1, 0)

    @njit
    def multiply(row, num_rows, x, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset):
        start, left = row * row_bytes, num_rows - row
        if ahead == NOTHING_AHEAD:
            ahead = offset
        if left >= FLOAT_ROWS - 1 and row:
            six_none(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)
        elif left >= FLOAT_ROWS - 1:
            six(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)
        elif left >= 3:
            four(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)
        elif left == 2:
            two(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)
        else:
            one(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)

    return multiply


def _integer_rows() -> Callable[..., Any]:
    """The same, up to 4 rows at a time."""
    one, two = _integer_intrinsic(1, 2, 1), _integer_intrinsic(2, 2, 1)
    four, four_none = _integer_intrinsic(4, 1, 1), _integer_intrinsic(4, 1, 0)

    @njit
    def multiply(row, num_rows, x, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset):
        start, left = row * row_bytes, num_rows - row
        if left >= INTEGER_ROWS and row:
            four_none(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)
        elif left >= INTEGER_ROWS:
            four(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)
        else:
            if left & 2:
                two(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)
                start, sums_offset = start + 2 * row_bytes, sums_offset + 2 * ROW_OF_SUMS
            if left & 1:
                one(x, start, row_bytes, num_steps, weight, offset, panel_bytes, ahead, carry, sums, sums_offset)

    return multiply


float_bf16, pairs_int8 = _float_rows(), _integer_rows()
widen_pairs_4, widen_pairs_8 = _widen_intrinsic(4), _widen_intrinsic(8)
