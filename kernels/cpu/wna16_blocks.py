"""Weights of 4- and 8-bit codes as LLVM code sees them: dot products of a few rows straight from the codes, and blocks widened to bfloat16.

Layouts, made at load, of panels of 16 outputs (N filled up to 32, K to 32):

4 bits   int32 [N / 16, K / 8, 16]  the 8 inputs of a word: nibbles 0 to 3 hold the even ones, 4 to 7 the odd ones, so that a word shifted
                                    by 4 * j has inputs 2 * j and 2 * j + 1 lowest in its halves, as a pair of bfloat16 stands
8 bits   int8 [N / 16, K / 2, 2, 16]  code - 128; input k of output n: at [n % 16 // 8, 2 * (n % 8) + k % 2] of the pair k // 2

scales float32 [G, N]; shifts float32 [G, N], zero minus the middle code (8 or 128), or empty where all are 0; a group has `group` inputs.
A weight is (code - middle - shift) * scale. 64 bytes of codes are a line.
"""

from __future__ import annotations

import struct

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from dspark.kernels.cpu.blocks import BF16
from dspark.kernels.cpu.llvm import (
    I8,
    LINE_BYTES,
    WORDS,
    Loop,
    all_lanes,
    bytes_at,
    call,
    constant,
    load,
    prefetch_line,
)
from dspark.kernels.cpu.simd import I16, I32, I64, LANES, VECTOR, broadcast, element_pointer, multiply_add

PAIRS = ir.VectorType(I16, 2 * LANES)
INPUTS_OF_LINE = {4: 8, 8: 4}
_NIBBLES = [struct.unpack("<I", struct.pack("<f", code - 8))[0] >> 16 for code in range(16)]
# an index has five bits that count, of which the fifth belongs to the next nibble: the table stands twice
_TABLE = ir.Constant(PAIRS, _NIBBLES * 2)
# Two vectors of floats become one of bfloat16 side by side. So that pairs come out, the first has both inputs of outputs 0 to 7.
_HALF_OUTPUTS = [ir.Constant(WORDS, [8 * half + lane // 2 for lane in range(LANES)]) for half in range(2)]
_BY_HALVES = ir.Constant(PAIRS, [lane // 2 + 16 * (lane % 2) for lane in range(2 * LANES)])


def _pair(builder, raw, index):
    """Inputs 2 * index and 2 * index + 1 of a line of 4-bit codes, less 8, as pairs of bfloat16."""
    return _lookup(builder, _TABLE, builder.lshr(raw, constant(PAIRS, 4 * index)) if index else raw)


def _lookup(builder, table, indices):
    return call(builder, "llvm.x86.avx512.permvar.hi.512", [table, indices], PAIRS)


def _floats_of_nibbles(builder, base, at, num_pairs):
    """The floats of a line, pair by pair: outputs 0 to 7, outputs 8 to 15."""
    raw = _lookup(builder, load(builder, builder.gep(base, [at]), PAIRS), _BY_HALVES)
    for index in range(num_pairs):
        words = builder.bitcast(_pair(builder, raw, index), WORDS)
        low, high = builder.shl(words, constant(WORDS, 16)), builder.and_(words, constant(WORDS, -65536))
        yield builder.bitcast(low, VECTOR), builder.bitcast(high, VECTOR)


def _floats_of_bytes(builder, base, at, num_pairs):
    for index in range(num_pairs):
        places = (builder.gep(base, [builder.add(at, I64(32 * index + 16 * half))]) for half in range(2))
        raw = [load(builder, place, ir.VectorType(I8, LANES)) for place in places]
        yield tuple(builder.sitofp(builder.sext(codes, WORDS), VECTOR) for codes in raw)


def _widen_intrinsic(bits: int, shifted: bool, scaled: bool):
    """target[0 : lines * pairs of a line] = the weights of one panel's lines that share a scale, rounded to bfloat16: lines of 16 pairs.

    scaled, shifted: whether the codes are multiplied by scales and have shifts. ahead: offset of the lines to ask for meanwhile.
    """
    floats = _floats_of_nibbles if bits == 4 else _floats_of_bytes
    num_pairs = INPUTS_OF_LINE[bits] // 2

    @intrinsic
    def widen_lines(typingctx, codes, offset, num_lines, ahead, scales, shifts, first, target, target_offset):
        integer = types.int64
        signature = types.void(codes, integer, integer, integer, scales, shifts, integer, target, integer)

        def codegen(context, builder, sig, args):
            codes_v, off, count, ahead_v, scales_v, shifts_v, first_v, target_v, target_off = args
            base = bytes_at(context, builder, sig.args[0], codes_v, off)
            ahead_base = bytes_at(context, builder, sig.args[0], codes_v, ahead_v)
            out = bytes_at(context, builder, sig.args[7], target_v, target_off)

            def by_halves(position, array):
                values = load(builder, element_pointer(context, builder, sig.args[position], array, first_v), VECTOR)
                return [builder.shuffle_vector(values, values, outputs) for outputs in _HALF_OUTPUTS]

            scale, shift = by_halves(4, scales_v) if scaled else [], by_halves(5, shifts_v) if shifted else []
            loop = Loop(builder, count)
            at = builder.mul(loop.index, I64(LINE_BYTES))
            prefetch_line(builder, ahead_base, at, level=2)
            for index, halves in enumerate(floats(builder, base, at, num_pairs)):
                values = [builder.fsub(half, shift[i]) if shifted else half for i, half in enumerate(halves)]
                values = [builder.fmul(value, scale[i]) if scaled else value for i, value in enumerate(values)]
                pair = call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", [values[1], values[0]], BF16.operand)
                place = builder.gep(out, [builder.add(builder.mul(at, I64(num_pairs)), I64(LINE_BYTES * index))])
                builder.store(pair, builder.bitcast(place, BF16.operand.as_pointer()), align=1)
            loop.close()
            return context.get_dummy_value()

        return signature, codegen

    return widen_lines


def _nibble_dots_intrinsic(num_rows: int, shifted: bool):
    """sums[r, 0:32] = row r of x times one block of 4-bit codes, group by group; input_sums: of each row, its inputs' sums by group."""

    @intrinsic
    def nibble_dots(typingctx, x, x_offset, row_bytes, codes, offset, panel_bytes, ahead, num_groups, lines_of_group, scales, shifts, first,
                    stride, input_sums, sums, sums_offset):  # fmt: skip
        integer = types.int64
        three, five = (integer,) * 3, (integer,) * 5
        signature = types.void(x, *three[1:], codes, *five, scales, shifts, *three[1:], input_sums, sums, integer)

        def codegen(context, builder, sig, args):
            (x_v, x_off, row_b, codes_v, off, panel_b, ahead_v, groups, lines, scales_v, shifts_v, first_v, stride_v, input_sums_v, sums_v,
             sums_off) = args  # fmt: skip
            x_base = bytes_at(context, builder, sig.args[0], x_v, x_off)
            base, ahead_base = (bytes_at(context, builder, sig.args[3], codes_v, place) for place in (off, ahead_v))
            scales_base = element_pointer(context, builder, sig.args[9], scales_v, first_v)
            shifts_base = element_pointer(context, builder, sig.args[10], shifts_v, first_v) if shifted else None
            inputs_base = element_pointer(context, builder, sig.args[13], input_sums_v, I64(0))
            zero = constant(VECTOR, 0.0)
            outer = Loop(builder, groups, [zero] * (2 * num_rows))
            inner = Loop(builder, lines, [zero] * (4 * num_rows))  # two chains for each row and panel: one waits for its own additions
            line = builder.add(builder.mul(outer.index, lines), inner.index)
            at, column = builder.mul(line, I64(LINE_BYTES)), builder.mul(line, I64(16))
            new = list(inner.values)
            for j in range(2):
                place = builder.add(at, builder.mul(panel_b, I64(j)))
                raw = load(builder, builder.gep(base, [place]), PAIRS)
                prefetch_line(builder, ahead_base, place, level=2)
                for index in range(4):
                    pair = builder.bitcast(_pair(builder, raw, index), BF16.operand)
                    for r in range(num_rows):
                        source = builder.gep(x_base, [builder.add(builder.add(column, I64(4 * index)), builder.mul(row_b, I64(r)))])
                        word = builder.load(builder.bitcast(source, I32.as_pointer()), align=4)
                        spread = builder.bitcast(all_lanes(builder, word), BF16.operand)
                        chain = 4 * r + 2 * j + index % 2
                        new[chain] = call(builder, BF16.dot_instruction, [new[chain], spread, pair], VECTOR)
            inner.close(new)
            row_of_scales = builder.mul(outer.index, stride_v)
            totals = []
            for r in range(num_rows):
                for j in range(2):
                    column = builder.add(row_of_scales, I64(LANES * j))
                    value = builder.fadd(new[4 * r + 2 * j], new[4 * r + 2 * j + 1])
                    if shifted:
                        place = builder.gep(inputs_base, [builder.add(outer.index, builder.mul(groups, I64(r)))])
                        input_sum = broadcast(builder, builder.load(place))
                        shift = load(builder, builder.gep(shifts_base, [column]), VECTOR)
                        value = builder.fsub(value, builder.fmul(shift, input_sum))
                    scale = load(builder, builder.gep(scales_base, [column]), VECTOR)
                    totals.append(multiply_add(builder, value, scale, outer.values[2 * r + j]))
            outer.close(totals)
            sums_base = bytes_at(context, builder, sig.args[14], sums_v, sums_off)
            for index, total in enumerate(totals):
                place = builder.gep(sums_base, [I64(LINE_BYTES * index)])
                builder.store(total, builder.bitcast(place, VECTOR.as_pointer()), align=4)
            return context.get_dummy_value()

        return signature, codegen

    return nibble_dots


widen_4, widen_4_scaled, widen_4_shifted = (_widen_intrinsic(4, *how) for how in ((False, False), (False, True), (True, True)))
widen_8, widen_8_scaled, widen_8_shifted = (_widen_intrinsic(8, *how) for how in ((False, False), (False, True), (True, True)))
_nibbles_1, _nibbles_2, _nibbles_4 = (_nibble_dots_intrinsic(rows, False) for rows in (1, 2, 4))
_shifted_1, _shifted_2, _shifted_4 = (_nibble_dots_intrinsic(rows, True) for rows in (1, 2, 4))


@njit
def nibble_dots(
    num_rows, x, x_offset, row_bytes, codes, offset, panel_bytes, ahead, num_groups, lines_of_group, scales, shifts, first, stride,
    input_sums, sums,
):  # fmt: skip
    """sums[r, 0:32] = 1, 2 or 4 rows of x times one block of 4-bit codes, group by group. first: of the block's outputs in a row of
    `stride` scales and shifts (which may be empty). input_sums: of each row, its inputs' sums by group; ahead: offset of the next block."""
    groups = num_groups, lines_of_group, scales, shifts, first, stride, input_sums
    if shifts.size:
        if num_rows == 4:
            _shifted_4(x, x_offset, row_bytes, codes, offset, panel_bytes, ahead, *groups, sums, 0)
        elif num_rows == 2:
            _shifted_2(x, x_offset, row_bytes, codes, offset, panel_bytes, ahead, *groups, sums, 0)
        else:
            _shifted_1(x, x_offset, row_bytes, codes, offset, panel_bytes, ahead, *groups, sums, 0)
    elif num_rows == 4:
        _nibbles_4(x, x_offset, row_bytes, codes, offset, panel_bytes, ahead, *groups, sums, 0)
    elif num_rows == 2:
        _nibbles_2(x, x_offset, row_bytes, codes, offset, panel_bytes, ahead, *groups, sums, 0)
    else:
        _nibbles_1(x, x_offset, row_bytes, codes, offset, panel_bytes, ahead, *groups, sums, 0)
