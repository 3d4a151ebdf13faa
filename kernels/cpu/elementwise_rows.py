"""One row of a norm or of a gated activation, 16 numbers at a time.

What a row gives depends on nothing but the row: a number's place in it decides how it is computed, sums have one order. The last numbers
of a row that fill no vector go through the same arithmetic one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from dspark.kernels.cpu.llvm import BFLOATS, HALVES, ROUNDS_BF16, WORDS, Loop, constant, rounded_bf16
from dspark.kernels.cpu.simd import I16, I32, I64, LANES, VECTOR, broadcast, element_pointer, load_vector, multiply_add, store, widen

SUMS = 4
"""Vectors that a sum of squares is kept in: one alone would wait for its own last addition at every step."""
_FINDS_SUBNORMALS = bool(binding.get_host_cpu_features().get("avx512dq"))
_SUBNORMAL = 1 << 5
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_ROUNDER = 1.5 * 2.0**23 + 127
"""Added to a small float32 number, it leaves the nearest integer, plus the exponent's bias, in the lowest bits."""


def narrow_bf16(builder, value):
    """16 floats to bfloat16 (as 16-bit integers), to nearest even, as torch rounds: NaN stays NaN, subnormal numbers stay what they are."""
    if not (ROUNDS_BF16 and _FINDS_SUBNORMALS):
        return rounded_bf16(builder, value)
    # the instruction takes subnormal numbers for zeros: where there is one, all 16 go the long way
    lanes = ir.VectorType(ir.IntType(1), LANES)
    find = cgutils.get_or_insert_function(builder.module, ir.FunctionType(lanes, [VECTOR, I32]), "llvm.x86.avx512.fpclass.ps.512")
    found = builder.bitcast(builder.call(find, [value, I32(_SUBNORMAL)]), I16)
    short = builder.bitcast(builder.fptrunc(value, BFLOATS), HALVES)
    before = builder.block
    with builder.if_then(builder.icmp_unsigned("!=", found, I16(0)), likely=False):
        long, inside = rounded_bf16(builder, value), builder.block
    result = builder.phi(HALVES)
    result.add_incoming(short, before)
    result.add_incoming(long, inside)
    return result


def store_floats(builder, value, pointer, element_type):
    """16 floats to where float32 or bfloat16 numbers (as uint16) are; gives back what was stored, as floats."""
    if element_type == types.uint16:
        halves = narrow_bf16(builder, value)
        builder.store(halves, builder.bitcast(pointer, HALVES.as_pointer()), align=2)
        return builder.bitcast(builder.shl(builder.zext(halves, WORDS), constant(WORDS, 16)), VECTOR)
    builder.store(value, builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
    return value


def pointers(context, builder, sig, args, *positions):
    """Where the arrays among an intrinsic's arguments begin."""
    return [element_pointer(context, builder, sig.args[i], args[i], I64(0)) for i in positions]


def _lane_sum(builder, vector):
    """The sum of 16 lanes: halves added to each other, so the order is fixed."""
    count = LANES
    while count > 1:
        count //= 2
        low, high = (
            builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, count), list(range(first, first + count))))
            for first in (0, count)
        )
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, I32(0))


def _sum_squares(builder, count, square):
    """The sum over `count` vectors, square(index, sum) -> sum + vector ** 2, in SUMS sums one after the other."""
    sums = [cgutils.alloca_once_value(builder, constant(VECTOR, 0.0)) for _ in range(SUMS)]
    for place in sums:
        builder.store(constant(VECTOR, 0.0), place)
    groups, rest = builder.lshr(count, I64(2)), builder.and_(count, I64(SUMS - 1))
    with builder.if_then(builder.icmp_signed(">", groups, I64(0))):
        loop = Loop(builder, groups)
        for j, place in enumerate(sums):
            index = builder.add(builder.mul(loop.index, I64(SUMS)), I64(j))
            builder.store(square(index, builder.load(place)), place)
        loop.close()
    with builder.if_then(builder.icmp_signed(">", rest, I64(0))):
        loop = Loop(builder, rest)
        index = builder.add(builder.mul(groups, I64(SUMS)), loop.index)
        builder.store(square(index, builder.load(sums[0])), sums[0])
        loop.close()
    first, second, third, fourth = (builder.load(place) for place in sums)
    return _lane_sum(builder, builder.fadd(builder.fadd(first, second), builder.fadd(third, fourth)))


@intrinsic
def _squares(typingctx, source, num_vectors):
    """Sum of the squares of the first 16 * num_vectors numbers."""

    def codegen(context, builder, sig, args):
        (base,) = pointers(context, builder, sig, args, 0)

        def square(index, total):
            value = load_vector(builder, builder.gep(base, [builder.mul(index, I64(LANES))]), sig.args[0].dtype)
            return multiply_add(builder, value, value, total)

        return _sum_squares(builder, args[1], square)

    return types.float32(source, types.int64), codegen


@intrinsic
def _add_squares(typingctx, source, kept, num_vectors):
    """kept += source, rounded, in the first 16 * num_vectors numbers; the sum of the squares of what is kept."""

    def codegen(context, builder, sig, args):
        source_base, kept_base = pointers(context, builder, sig, args, 0, 1)

        def square(index, total):
            offset = builder.mul(index, I64(LANES))
            target = builder.gep(kept_base, [offset])
            added = load_vector(builder, builder.gep(source_base, [offset]), sig.args[0].dtype)
            value = builder.fadd(load_vector(builder, target, sig.args[1].dtype), added)
            value = store_floats(builder, value, target, sig.args[1].dtype)
            return multiply_add(builder, value, value, total)

        return _sum_squares(builder, args[2], square)

    return types.float32(source, kept, types.int64), codegen


@intrinsic
def _scale_vectors(typingctx, source, weight, scale, target, num_vectors):
    """target = source * scale * weight in the first 16 * num_vectors numbers. target may be source."""

    def codegen(context, builder, sig, args):
        source_base, weight_base, target_base = pointers(context, builder, sig, args, 0, 1, 3)
        factor = broadcast(builder, args[2])
        loop = Loop(builder, args[4])
        offset = builder.mul(loop.index, I64(LANES))
        value = load_vector(builder, builder.gep(source_base, [offset]), sig.args[0].dtype)
        weights = load_vector(builder, builder.gep(weight_base, [offset]), sig.args[1].dtype)
        value = builder.fmul(builder.fmul(value, factor), weights)
        store_floats(builder, value, builder.gep(target_base, [offset]), sig.args[3].dtype)
        loop.close()
        return context.get_dummy_value()

    return types.void(source, weight, types.float32, target, types.int64), codegen


@njit(cache=True, nogil=True, error_model="numpy")
def _finish_norm(source, weight, total, eps, target):
    """target = source * weight / sqrt(total / width + eps)."""
    width = target.shape[0]
    whole = width // LANES
    scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
    if whole:
        _scale_vectors(source, weight, scale, target, whole)
    for i in range(whole * LANES, width):
        store(target, i, widen(source[i]) * scale * widen(weight[i]))


@njit(cache=True, nogil=True, error_model="numpy")
def norm_row(source, weight, eps, target):
    """target = source / rms(source) * weight. All contiguous; target may be source."""
    width = target.shape[0]
    whole = width // LANES
    total = _squares(source, whole)
    for i in range(whole * LANES, width):
        value = widen(source[i])
        total += value * value
    _finish_norm(source, weight, total, eps, target)


@njit(cache=True, nogil=True, error_model="numpy")
def add_norm_row(source, kept, weight, eps, target):
    """kept += source, rounded; target = kept / rms(kept) * weight. All contiguous."""
    width = target.shape[0]
    whole = width // LANES
    total = _add_squares(source, kept, whole)
    for i in range(whole * LANES, width):
        store(kept, i, widen(kept[i]) + widen(source[i]))
        value = widen(kept[i])
        total += value * value
    _finish_norm(kept, weight, total, eps, target)


def _number(kind, value):
    return constant(VECTOR, value) if kind == VECTOR else ir.Constant(kind, value)


def _exp_of_negative(builder, x):
    """e**-x of a float32 number or 16 of them, to 2 units in the last place; infinite from x = -88.4 down, about 1e-38 from x = 87.5 up.

    The arithmetic of `simd.exp_approx`, with fewer steps: adding _ROUNDER rounds and moves the exponent to where a shift finds it.
    """
    kind = x.type
    low, high = _number(kind, -89.0), _number(kind, 87.5)
    x = builder.select(builder.fcmp_ordered("<", x, high), x, high)
    x = builder.select(builder.fcmp_ordered(">", x, low), x, low)
    moved = multiply_add(builder, x, _number(kind, -_LOG2_E), _number(kind, _ROUNDER))
    n = builder.fsub(moved, _number(kind, _ROUNDER))
    r = multiply_add(builder, n, _number(kind, -_LN2_HIGH), builder.fneg(x))
    r = multiply_add(builder, n, _number(kind, -_LN2_LOW), r)
    p = _number(kind, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = multiply_add(builder, p, r, _number(kind, coefficient))
    p = builder.fadd(multiply_add(builder, builder.fmul(p, r), r, r), _number(kind, 1.0))
    bits, shift = (WORDS, constant(WORDS, 23)) if kind == VECTOR else (I32, I32(23))
    return builder.fmul(p, builder.bitcast(builder.shl(builder.bitcast(moved, bits), shift), kind), flags=("contract",))


def _silu(builder, value, up):
    """silu(value) * up."""
    below = builder.fadd(_number(value.type, 1.0), _exp_of_negative(builder, value), flags=("contract",))
    return builder.fmul(builder.fdiv(value, below), up)


def _gelu_tanh(builder, value, up):
    """gelu(value) * up: x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x**3)), which is its tanh form with one exponential."""
    one = _number(value.type, 1.0)
    inner = builder.fmul(_number(value.type, 1.5957691216057308), value)
    cubic = multiply_add(builder, builder.fmul(_number(value.type, 0.044715), value), value, one)
    below = builder.fadd(one, _exp_of_negative(builder, builder.fmul(inner, cubic)), flags=("contract",))
    return builder.fmul(builder.fdiv(value, below), up)


def _gated_intrinsics(gated: Callable[..., Any]):
    """A gated activation over vectors, and of one number."""

    @intrinsic
    def over_vectors(typingctx, gate, up, target, num_vectors):
        def codegen(context, builder, sig, args):
            bases = pointers(context, builder, sig, args, 0, 1, 2)
            loop = Loop(builder, args[3])
            offset = builder.mul(loop.index, I64(LANES))
            values = [load_vector(builder, builder.gep(bases[i], [offset]), sig.args[i].dtype) for i in range(2)]
            store_floats(builder, gated(builder, *values), builder.gep(bases[2], [offset]), sig.args[2].dtype)
            loop.close()
            return context.get_dummy_value()

        return types.void(gate, up, target, types.int64), codegen

    @intrinsic
    def of_number(typingctx, gate, up):
        def codegen(context, builder, sig, args):
            return gated(builder, *args)

        return types.float32(types.float32, types.float32), codegen

    return over_vectors, of_number


_silu_vectors, _silu_number = _gated_intrinsics(_silu)
_gelu_vectors, _gelu_number = _gated_intrinsics(_gelu_tanh)


@njit(cache=True, nogil=True, error_model="numpy")
def silu_row(gate, up, target):
    """target = silu(gate) * up. All contiguous."""
    whole = target.shape[0] // LANES
    if whole:
        _silu_vectors(gate, up, target, whole)
    for i in range(whole * LANES, target.shape[0]):
        store(target, i, _silu_number(widen(gate[i]), widen(up[i])))


@njit(cache=True, nogil=True, error_model="numpy")
def gelu_tanh_row(gate, up, target):
    """target = gelu(gate) * up. All contiguous."""
    whole = target.shape[0] // LANES
    if whole:
        _gelu_vectors(gate, up, target, whole)
    for i in range(whole * LANES, target.shape[0]):
        store(target, i, _gelu_number(widen(gate[i]), widen(up[i])))
