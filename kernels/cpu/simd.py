"""Vector building blocks for the compiled CPU kernels.

What plain loops need, which numba vectorises well, and what vector code written by hand begins with. It lowers to whatever the machine has
(AVX-512, AVX2, NEON).

bfloat16 arrays are seen as uint16: the upper half of a float32. In 8-bit caches an int8 array is what it says, a uint8 array holds float8
numbers (e4m3fn: sign, 4 bits of exponent with bias 7, 3 of mantissa).
"""

from __future__ import annotations

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

LANES = 16
WIDE_REGISTERS = bool(binding.get_host_cpu_features().get("avx512f"))
"""Whether there are 32 registers of 16 floats (AVX-512) instead of 16 of 8 (AVX2), in which half as many sums find room."""
FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
HALF_OVER_FP8 = 256.0
"""A float8 number's bits, moved to where float16 (bias 15) has exponent and mantissa, are the number divided by 2**8; subnormals too."""


@intrinsic
def float_bits(typingctx, value):
    """float32 -> its uint32 bit pattern."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], I32)

    return types.uint32(types.float32), codegen


@intrinsic
def bits_float(typingctx, value):
    """uint32 bit pattern -> float32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], FLOAT)

    return types.float32(types.uint32), codegen


def widen(value):
    """A stored element (float32, or bfloat16 as uint16) as float32. Compiled code only."""
    raise NotImplementedError


@overload(widen)
def _widen(value):
    if value == types.uint16:
        return lambda value: bits_float(np.uint32(value) << np.uint32(16))
    return lambda value: np.float32(value)


@njit
def round_bf16(value):
    """float32 -> bfloat16 as uint16, to nearest even. NaN stays NaN."""
    bits = float_bits(np.float32(value))
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded) if value == value else np.uint16(0x7FC0)


def store(array, index, value):
    """array[index] = value, rounded to the array's type (float32, or bfloat16 as uint16). Compiled code only."""
    raise NotImplementedError


@overload(store)
def _store(array, index, value):
    if array.dtype == types.uint16:

        def put(array, index, value):
            array[index] = round_bf16(value)
    elif array.dtype == types.float32:

        def put(array, index, value):
            array[index] = np.float32(value)
    else:
        return None  # codes are made by `rope_rows`

    return put


@njit
def exp_approx(x):
    """e**x for float32 x <= 88, to 2 units in the last place; below -87 it is 0. Free of branches, so loops over it vectorise.

    Argument reduction by powers of two and the degree-6 polynomial of the Cephes library's expf.
    """
    x = min(max(x, np.float32(-87.5)), np.float32(88.0))
    n = np.floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    power = bits_float(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))
    return np.float32(0.0) if x <= np.float32(-87.0) else p * power


def element_pointer(context, builder, array_type, array, offset):
    """Pointer to element `offset` of a contiguous array."""
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    return builder.gep(data, [offset], inbounds=True)


def load_vector(builder, pointer, element_type):
    """16 stored elements from pointer on, widened to <16 x float>."""
    if element_type == types.int8:
        raw = builder.load(builder.bitcast(pointer, ir.VectorType(I8, LANES).as_pointer()), align=1)
        return builder.sitofp(builder.sext(raw, ir.VectorType(I32, LANES)), VECTOR)
    if element_type == types.uint8:
        return _widen_fp8(builder, builder.load(builder.bitcast(pointer, ir.VectorType(I8, LANES).as_pointer()), align=1))
    if element_type == types.uint16:
        raw = builder.load(builder.bitcast(pointer, ir.VectorType(I16, LANES).as_pointer()), align=2)
        wide = builder.shl(builder.zext(raw, ir.VectorType(I32, LANES)), ir.Constant(ir.VectorType(I32, LANES), [16] * LANES))
        return builder.bitcast(wide, VECTOR)
    return builder.load(builder.bitcast(pointer, VECTOR.as_pointer()), align=4)


def _widen_fp8(builder, raw):
    """<16 x i8> of float8 numbers -> <16 x float>, by way of float16."""
    halves = ir.VectorType(I16, LANES)

    def all_lanes(value):
        return ir.Constant(halves, [value] * LANES)

    bits = builder.zext(raw, halves)
    sign = builder.shl(builder.and_(bits, all_lanes(0x80)), all_lanes(8))
    rest = builder.shl(builder.and_(bits, all_lanes(0x7F)), all_lanes(7))
    half = builder.bitcast(builder.or_(sign, rest), ir.VectorType(ir.HalfType(), LANES))
    return builder.fmul(builder.fpext(half, VECTOR), ir.Constant(VECTOR, [HALF_OVER_FP8] * LANES))


def broadcast(builder, scalar):
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))


def multiply_add(builder, a, b, c):
    """a * b + c, fused where the machine can."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))
