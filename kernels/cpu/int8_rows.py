"""Rows going into and coming out of a product of 8-bit integers: quantized to bytes, and scaled to numbers, 16 values at a time."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from dspark.kernels.cpu.blocks import BLOCK_OUTPUTS
from dspark.kernels.cpu.llvm import I8, WORDS, Loop, all_lanes, call, constant, load, store_rounded
from dspark.kernels.cpu.simd import I32, I64, LANES, VECTOR, bits_float, broadcast, element_pointer, float_bits, load_vector, store, widen
from dspark.kernels.quant_math import INT8_STEPS, SMALLEST_TOKEN

_MAGNITUDE, _INFINITE = 0x7FFFFFFF, 0x7F800000


@intrinsic
def _largest_bits(typingctx, values, start, num_vectors):
    """The bits of the largest magnitude of values[start:] as uint32; as an integer NaN is above infinity, so it is found too."""

    def codegen(context, builder, sig, args):
        array, first, count = args
        base = element_pointer(context, builder, sig.args[0], array, first)
        loop = Loop(builder, count, [constant(WORDS, 0)])
        values = load_vector(builder, builder.gep(base, [builder.mul(loop.index, I64(LANES))]), sig.args[0].dtype)
        bits = builder.and_(builder.bitcast(values, WORDS), constant(WORDS, _MAGNITUDE))
        largest = builder.select(builder.icmp_unsigned(">", bits, loop.values[0]), bits, loop.values[0])
        loop.close([largest])
        return call(builder, "llvm.vector.reduce.umax.v16i32", [largest], I32)

    return types.uint32(values, types.int64, types.int64), codegen


@intrinsic
def _write_codes(typingctx, values, start, num_vectors, inverse, zero_point, codes, target):
    """codes[target:] = round(values[start:] * inverse), at most 127, plus zero_point."""

    def codegen(context, builder, sig, args):
        array, first, count, inverse_v, zero_v, codes_v, target_v = args
        base = element_pointer(context, builder, sig.args[0], array, first)
        out = element_pointer(context, builder, sig.args[5], codes_v, target_v)
        factor, shift = broadcast(builder, inverse_v), all_lanes(builder, zero_v)
        loop = Loop(builder, count)
        offset = builder.mul(loop.index, I64(LANES))
        values = load_vector(builder, builder.gep(base, [offset]), sig.args[0].dtype)
        rounded = call(builder, "llvm.nearbyint.v16f32", [builder.fmul(values, factor)], VECTOR)
        limit = constant(VECTOR, 127.0)
        limited = builder.select(builder.fcmp_ordered("<", rounded, limit), rounded, limit)
        words = builder.add(builder.fptosi(limited, WORDS), shift)
        row = builder.trunc(words, ir.VectorType(I8, LANES))
        builder.store(row, builder.bitcast(builder.gep(out, [offset]), row.type.as_pointer()), align=1)
        loop.close()
        return context.get_dummy_value()

    return types.void(values, types.int64, types.int64, types.float32, types.int32, codes, types.int64), codegen


@njit(cache=True, nogil=True, error_model="numpy")
def quantize_row(x, row, zero_point, codes, row_scales):
    """codes[row] = code + zero_point of x[row], as bytes; row_scales[row] = the step. See `quant_math.quantize_tokens`."""
    width = x.shape[1]
    source, target = x[row], codes[row]
    flat_x, flat_codes, start = x.reshape(-1), codes.reshape(-1), row * width
    whole = width // LANES
    top_bits = _largest_bits(flat_x, start, whole) if whole else np.uint32(0)
    for i in range(whole * LANES, width):
        top_bits = max(top_bits, float_bits(widen(source[i])) & np.uint32(_MAGNITUDE))
    top = bits_float(top_bits)
    if top_bits >= np.uint32(_INFINITE) or top < np.float32(SMALLEST_TOKEN):
        row_scales[row] = np.float32(np.nan) if top_bits >= np.uint32(_INFINITE) else np.float32(1.0)
        target[:width] = np.uint8(zero_point)
        return
    row_scales[row] = top / np.float32(INT8_STEPS)
    inverse = np.float32(INT8_STEPS) / top
    if whole:
        _write_codes(flat_x, start, whole, inverse, zero_point, flat_codes, row * codes.shape[1])
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
