"""Rows going into and coming out of a product of 8-bit integers: quantized to bytes, and scaled to numbers, 16 values at a time."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from dspark.kernels.cpu.blocks import BLOCK_OUTPUTS
from dspark.kernels.cpu.llvm import HALVES, I8, WORDS, Loop, call, constant, load, store_rounded
from dspark.kernels.cpu.row_vectors import Rows, pointers
from dspark.kernels.cpu.simd import FLOAT, I16, I32, I64, LANES, VECTOR, bits_float, broadcast, element_pointer, float_bits, store, widen
from dspark.kernels.quant_math import INT8_STEPS, SMALLEST_TOKEN

_MAGNITUDE, _INFINITE = 0x7FFFFFFF, 0x7F800000


def _largest(builder, base, vector, rounds):
    """The largest of the integers in `rounds` vectors from base on, their signs left out, as 32 bits; 0 where there are none."""
    top = cgutils.alloca_once(builder, vector)
    builder.store(constant(vector, 0), top)
    with builder.if_then(builder.icmp_signed(">", rounds, I64(0))):
        loop = Loop(builder, rounds)
        values = load(builder, builder.gep(base, [builder.mul(loop.index, I64(vector.count))]), vector)
        bits = builder.and_(values, constant(vector, (1 << vector.element.width - 1) - 1))
        before = builder.load(top)
        builder.store(builder.select(builder.icmp_unsigned(">", bits, before), bits, before), top)
        loop.close()
    name = f"llvm.vector.reduce.umax.v{vector.count}i{vector.element.width}"
    return builder.zext(call(builder, name, [builder.load(top)], vector.element), I32)


@intrinsic
def _largest_bits(typingctx, values, num_vectors):
    """The bits of the largest magnitude of the first 16 * num_vectors numbers, as uint32; as an integer NaN is above infinity, so it is
    found too."""

    def codegen(context, builder, sig, args):
        (base,), count = pointers(context, builder, sig, args, 0), args[1]
        if sig.args[0].dtype != types.uint16:
            return _largest(builder, base, WORDS, count)
        # bfloat16 numbers are in the order of their upper halves: no need to widen them
        pairs = builder.lshr(count, I64(1))
        first = _largest(builder, base, ir.VectorType(I16, 2 * LANES), pairs)
        rest = builder.gep(base, [builder.mul(pairs, I64(2 * LANES))])
        last = _largest(builder, rest, HALVES, builder.and_(count, I64(1)))
        return builder.shl(builder.select(builder.icmp_unsigned(">", first, last), first, last), I32(16))

    return types.uint32(values, types.int64), codegen


@intrinsic
def _write_codes(typingctx, values, num_vectors, inverse, zero_point, codes):
    """codes = round(values * inverse), at most 127, plus zero_point, of the first 16 * num_vectors numbers.

    Times inverse they are between -128.4 and 128.4. zero_point is even, so that ties go to even codes with it as without.
    """

    def codegen(context, builder, sig, args):
        source, target = pointers(context, builder, sig, args, 0, 4)
        kind, rows = sig.args[0].dtype, Rows(builder, sig.args[0].dtype)
        factor, limit = broadcast(builder, args[2]), constant(VECTOR, 127.0)
        # a number added to it is rounded to an integer, whose last byte is the sum's last byte
        rounder = broadcast(builder, builder.fadd(builder.sitofp(args[3], FLOAT), ir.Constant(FLOAT, 1.5 * 2.0**23)))

        def put(row, place):
            builder.store(row, builder.bitcast(place, row.type.as_pointer()), align=1)

        def body(offset, vectors):
            numbers = rows.read(source, offset, kind, vectors)
            words = []
            for number in numbers:
                scaled = builder.fmul(number, factor)
                limited = builder.select(builder.fcmp_ordered("<", scaled, limit), scaled, limit)
                words.append(builder.bitcast(builder.fadd(limited, rounder), WORDS))
            place = builder.gep(target, [offset])
            if rows.in_halves and vectors == 2:
                lower, upper = builder.and_(words[0], constant(WORDS, 0xFF)), builder.shl(words[1], constant(WORDS, 8))
                put(builder.trunc(builder.or_(lower, upper), HALVES), place)
                return
            for j, word in enumerate(words):
                put(builder.trunc(word, ir.VectorType(I8, LANES)), builder.gep(place, [I64(LANES * j)]))

        rows.over(args[1], body)
        return context.get_dummy_value()

    return types.void(values, types.int64, types.float32, types.int32, codes), codegen


@njit(cache=True, nogil=True, error_model="numpy")
def quantize_row(x, row, zero_point, codes, row_scales):
    """codes[row] = code + zero_point of x[row], as bytes; row_scales[row] = the step. See `quant_math.quantize_tokens`."""
    width = x.shape[1]
    source, target = x[row], codes[row]
    whole = width // LANES
    top_bits = _largest_bits(source, whole)
    for i in range(whole * LANES, width):
        top_bits = max(top_bits, float_bits(widen(source[i])) & np.uint32(_MAGNITUDE))
    top = bits_float(top_bits)
    if top_bits >= np.uint32(_INFINITE) or top < np.float32(SMALLEST_TOKEN):
        row_scales[row] = np.float32(np.nan) if top_bits >= np.uint32(_INFINITE) else np.float32(1.0)
        target[:width] = np.uint8(zero_point)
        return
    row_scales[row] = top / np.float32(INT8_STEPS)
    inverse = np.float32(INT8_STEPS) / top
    _write_codes(source, whole, inverse, zero_point, target)
    for i in range(whole * LANES, width):
        code = np.int32(min(np.rint(widen(source[i]) * inverse), np.float32(127.0)))
        target[i] = np.uint8(code + zero_point)


def _finish_intrinsic(corrected: bool, biased: bool):
    """32 outputs of num_rows rows, with corrections and bias or without; see `finish_rows`."""

    @intrinsic
    def finish(typingctx, sums, sums_offset, num_rows, row_scales, row, corrections, scales, bias, first, out, out_offset, out_stride):
        integer = types.int64
        signature = types.void(sums, integer, integer, row_scales, integer, corrections, scales, bias, integer, out, integer, integer)

        def codegen(context, builder, sig, args):
            sums_v, sums_off, rows, row_scales_v, row_v, corrections_v, scales_v, bias_v, first_v, out_v, out_off, stride = args
            sums_base = element_pointer(context, builder, sig.args[0], sums_v, sums_off)
            row_base = element_pointer(context, builder, sig.args[3], row_scales_v, row_v)
            out_base = element_pointer(context, builder, sig.args[9], out_v, out_off)

            def constants(position, array, vector):
                base = element_pointer(context, builder, sig.args[position], array, first_v)
                return [load(builder, builder.gep(base, [I64(LANES * j)]), vector) for j in range(2)]

            correction = constants(5, corrections_v, WORDS) if corrected else []
            scale, shift = constants(6, scales_v, VECTOR), constants(7, bias_v, VECTOR) if biased else []
            loop = Loop(builder, rows)
            row_scale = broadcast(builder, builder.load(builder.gep(row_base, [loop.index])))
            for j in range(2):
                index = builder.add(builder.mul(loop.index, I64(BLOCK_OUTPUTS)), I64(LANES * j))
                total = load(builder, builder.gep(sums_base, [index]), WORDS)
                total = builder.sitofp(builder.add(total, correction[j]) if corrected else total, VECTOR)
                value = builder.fmul(builder.fmul(total, row_scale), scale[j])
                target = builder.gep(out_base, [builder.add(builder.mul(loop.index, stride), I64(LANES * j))])
                store_rounded(builder, builder.fadd(value, shift[j]) if biased else value, target, sig.args[9].dtype)
            loop.close()
            return context.get_dummy_value()

        return signature, codegen

    return finish


_finish, _finish_biased = _finish_intrinsic(False, False), _finish_intrinsic(False, True)
_finish_corrected, _finish_both = _finish_intrinsic(True, False), _finish_intrinsic(True, True)


@njit(cache=True, nogil=True, error_model="numpy")
def finish_rows(sums, sums_offset, row, num_rows, row_scales, corrections, scales, bias, block, out):
    """out[row + r, n] = (sums[r, n] + corrections[n]) * row_scales[row + r] * scales[n] + bias[n] for the 32 outputs of a block.

    In float32, in this order, nothing fused: what the reference computes. Empty corrections and an empty bias are left out. The last block
    may reach past the outputs.
    """
    width, n = out.shape[1], block * BLOCK_OUTPUTS
    flat, at = out.reshape(-1), row * width + n
    if n + BLOCK_OUTPUTS > width:
        _finish_tail(sums, sums_offset, row, num_rows, row_scales, corrections, scales, bias, n, out)
    elif corrections.size:
        if bias.size:
            _finish_both(sums, sums_offset, num_rows, row_scales, row, corrections, scales, bias, n, flat, at, width)
        else:
            _finish_corrected(sums, sums_offset, num_rows, row_scales, row, corrections, scales, bias, n, flat, at, width)
    elif bias.size:
        _finish_biased(sums, sums_offset, num_rows, row_scales, row, corrections, scales, bias, n, flat, at, width)
    else:
        _finish(sums, sums_offset, num_rows, row_scales, row, corrections, scales, bias, n, flat, at, width)


@njit(cache=True, nogil=True, error_model="numpy")
def _finish_tail(sums, sums_offset, row, num_rows, row_scales, corrections, scales, bias, first, out):
    """The same for the outputs from `first` on, fewer than a block."""
    for r in range(num_rows):
        for n in range(first, out.shape[1]):
            total = sums[sums_offset + r * BLOCK_OUTPUTS + n - first]
            if corrections.size:
                total += corrections[n]
            value = np.float32(total) * row_scales[row + r] * scales[n]
            store(out[row + r], n, value + bias[n] if bias.size else value)
