"""Rows going into and coming out of a product in bfloat16: laid out for tiles, and rounded with their scales and bias."""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from dspark.kernels.cpu.blocks import BLOCK_OUTPUTS
from dspark.kernels.cpu.llvm import Loop, load, store_rounded
from dspark.kernels.cpu.simd import I64, LANES, VECTOR, element_pointer, round_bf16, widen


def _finish_intrinsic(scaled: bool, biased: bool):
    """32 outputs of num_rows rows, times scales and plus bias or without; see `finish_sums`."""

    @intrinsic
    def finish(typingctx, sums, sums_offset, num_rows, scales, bias, first, out, out_offset, out_stride):
        integer = types.int64
        signature = types.void(sums, integer, integer, scales, bias, integer, out, integer, integer)

        def codegen(context, builder, sig, args):
            sums_v, sums_off, rows, scales_v, bias_v, first_v, out_v, out_off, stride = args
            sums_base = element_pointer(context, builder, sig.args[0], sums_v, sums_off)
            out_base = element_pointer(context, builder, sig.args[6], out_v, out_off)

            def constants(position, array):
                base = element_pointer(context, builder, sig.args[position], array, first_v)
                return [load(builder, builder.gep(base, [I64(LANES * j)]), VECTOR) for j in range(2)]

            scale, shift = constants(3, scales_v) if scaled else [], constants(4, bias_v) if biased else []
            loop = Loop(builder, rows)
            for j in range(2):
                index = builder.add(builder.mul(loop.index, I64(BLOCK_OUTPUTS)), I64(LANES * j))
                value = load(builder, builder.gep(sums_base, [index]), VECTOR)
                value = builder.fmul(value, scale[j]) if scaled else value
                value = builder.fadd(value, shift[j]) if biased else value
                target = builder.gep(out_base, [builder.add(builder.mul(loop.index, stride), I64(LANES * j))])
                store_rounded(builder, value, target, sig.args[6].dtype)
            loop.close()
            return context.get_dummy_value()

        return signature, codegen

    return finish


_finish, _finish_biased, _finish_scaled, _finish_both = (
    _finish_intrinsic(scaled, biased) for scaled in (False, True) for biased in (False, True)
)


@njit(cache=True, nogil=True, error_model="numpy")
def finish_sums(sums, sums_offset, row, num_rows, scales, bias, block, out):
    """out[row + r, n] = sums[r, n] * scales[n] + bias[n], rounded to bfloat16, for the 32 outputs of a block. sums: float32,
    rows of 32 from sums_offset on. Empty scales and an empty bias are left out. The last block may reach past the outputs."""
    width, n = out.shape[1], block * BLOCK_OUTPUTS
    flat, at = out.reshape(-1), row * width + n
    if n + BLOCK_OUTPUTS > width:
        for r in range(num_rows):
            for i in range(n, width):
                value = sums[sums_offset + r * BLOCK_OUTPUTS + i - n]
                if scales.size:
                    value *= scales[i]
                out[row + r, i] = round_bf16(value + bias[i] if bias.size else value)
    elif scales.size:
        if bias.size:
            _finish_both(sums, sums_offset, num_rows, scales, bias, n, flat, at, width)
        else:
            _finish_scaled(sums, sums_offset, num_rows, scales, bias, n, flat, at, width)
    elif bias.size:
        _finish_biased(sums, sums_offset, num_rows, scales, bias, n, flat, at, width)
    else:
        _finish(sums, sums_offset, num_rows, scales, bias, n, flat, at, width)


@njit(cache=True, nogil=True, error_model="numpy")
def copy_rows(x, row_bytes, target):
    """The rows of x [M, K] (bfloat16 as uint16) into flat bytes, row_bytes apart, with zeros behind each: what a tile reads beyond a row
    is multiplied by weights of 0, and must be a number for that."""
    width = x.shape[1]
    rows = target[: x.shape[0] * row_bytes].view(np.uint16).reshape(x.shape[0], row_bytes // 2)
    for row in range(x.shape[0]):
        rows[row, :width] = x[row]
        rows[row, width:] = np.uint16(0)


@njit(cache=True, nogil=True, error_model="numpy")
def group_sums(x, group, sums):
    """sums[row * G + g] = the sum of a row's inputs of group g, float32."""
    num_groups = x.shape[1] // group
    for row in range(x.shape[0]):
        for g in range(num_groups):
            total = np.float32(0.0)
            for k in range(g * group, (g + 1) * group):
                total += widen(x[row, k])
            sums[row * num_groups + g] = total
