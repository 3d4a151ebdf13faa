"""One row of a norm or of a gated activation, 16 numbers at a time.

What a row gives depends on nothing but the row: a number's place in it decides how it is computed, sums have one order. The last numbers
of a row that fill no vector go through the same arithmetic one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from dspark.kernels.cpu.llvm import WORDS, Loop, constant
from dspark.kernels.cpu.row_vectors import Rows, lane_sum, pointers
from dspark.kernels.cpu.simd import I32, I64, LANES, VECTOR, broadcast, multiply_add, store, widen

_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_POLYNOMIAL = (0.49999993, 0.1666652, 0.041668404, 0.008368899, 0.0013814222)
"""e**r = 1 + r + r**2 * polynomial(r), to 2**-27 where |r| <= ln(2) / 2: fitted for the smallest relative error there."""
_ROUNDER = 1.5 * 2.0**23 + 127
"""Added to a small float32 number, it leaves the nearest integer, plus the exponent's bias, in the lowest bits."""


def sum_squares(builder, rows, num_vectors, read):
    """The sum of the squares of num_vectors vectors, read(offset, vectors of the piece) -> vectors; in four sums, since one would wait for
    its own last addition at every step."""
    sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(4)]
    for place in sums:
        builder.store(constant(VECTOR, 0.0), place)

    def add(offset, vectors, places):
        for value, place in zip(read(offset, vectors), places, strict=False):
            builder.store(multiply_add(builder, value, value, builder.load(place)), place)

    fours, rest = builder.lshr(num_vectors, I64(2)), builder.and_(num_vectors, I64(3))
    with builder.if_then(builder.icmp_signed(">", fours, I64(0))):
        loop = Loop(builder, fours)
        for j in (0, 2):
            add(builder.add(builder.mul(loop.index, I64(4 * LANES)), I64(j * LANES)), 2, sums[j:])
        loop.close()
    done = builder.mul(fours, I64(4 * LANES))
    rows.over(rest, lambda offset, vectors: add(builder.add(done, offset), vectors, sums))
    first, second, third, fourth = (builder.load(place) for place in sums)
    return lane_sum(builder, builder.fadd(builder.fadd(first, second), builder.fadd(third, fourth)))


def squares(builder, base, kind, num_vectors):
    """Sum of the squares of the 16 * num_vectors numbers from base on."""
    rows = Rows(builder, kind)
    return sum_squares(builder, rows, num_vectors, lambda offset, vectors: rows.read(base, offset, kind, vectors))


def scale_vectors(builder, source, weight, scale, target, kinds, num_vectors):
    """target = source * scale * weight in the 16 * num_vectors numbers from these pointers on; kinds: of their numbers. target may be
    source."""
    rows, factor = Rows(builder, *kinds), broadcast(builder, scale)

    def body(offset, vectors):
        values, weights = rows.read(source, offset, kinds[0], vectors), rows.read(weight, offset, kinds[1], vectors)
        scaled = [builder.fmul(builder.fmul(value, factor), other) for value, other in zip(values, weights, strict=True)]
        rows.write(scaled, target, offset, kinds[2])

    rows.over(num_vectors, body)


@intrinsic
def _squares(typingctx, source, num_vectors):
    """Sum of the squares of the first 16 * num_vectors numbers."""

    def codegen(context, builder, sig, args):
        (base,) = pointers(context, builder, sig, args, 0)
        return squares(builder, base, sig.args[0].dtype, args[1])

    return types.float32(source, types.int64), codegen


@intrinsic
def _add_squares(typingctx, source, kept, num_vectors):
    """kept += source, rounded, in the first 16 * num_vectors numbers; the sum of the squares of what is kept."""

    def codegen(context, builder, sig, args):
        source_base, kept_base = pointers(context, builder, sig, args, 0, 1)

        kinds = sig.args[0].dtype, sig.args[1].dtype
        rows = Rows(builder, *kinds)

        def read(offset, vectors):
            added, values = rows.read(source_base, offset, kinds[0], vectors), rows.read(kept_base, offset, kinds[1], vectors)
            sums = [builder.fadd(value, other) for value, other in zip(values, added, strict=True)]
            return rows.write(sums, kept_base, offset, kinds[1])

        return sum_squares(builder, rows, args[2], read)

    return types.float32(source, kept, types.int64), codegen


@intrinsic
def _scale_vectors(typingctx, source, weight, scale, target, num_vectors):
    """target = source * scale * weight in the first 16 * num_vectors numbers. target may be source."""

    def codegen(context, builder, sig, args):
        source_base, weight_base, target_base = pointers(context, builder, sig, args, 0, 1, 3)
        kinds = [sig.args[i].dtype for i in (0, 1, 3)]
        scale_vectors(builder, source_base, weight_base, args[2], target_base, kinds, args[4])
        return context.get_dummy_value()

    return types.void(source, weight, types.float32, target, types.int64), codegen


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _finish_norm(source, weight, total, eps, target):
    """target = source * weight / sqrt(total / width + eps)."""
    width = target.shape[0]
    whole = width // LANES
    scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
    if whole:
        _scale_vectors(source, weight, scale, target, whole)
    for i in range(whole * LANES, width):
        store(target, i, widen(source[i]) * scale * widen(weight[i]))


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def norm_row(source, weight, eps, target):
    """target = source / rms(source) * weight. All contiguous; target may be source."""
    width = target.shape[0]
    whole = width // LANES
    total = _squares(source, whole)
    for i in range(whole * LANES, width):
        value = widen(source[i])
        total += value * value
    _finish_norm(source, weight, total, eps, target)


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
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

    Reduced to |r| <= ln(2) / 2 as in `simd.exp_approx`, in fewer steps: adding _ROUNDER rounds, and leaves the exponent for a shift.
    """
    kind = x.type
    low, high = _number(kind, -89.0), _number(kind, 87.5)
    x = builder.select(builder.fcmp_ordered("<", x, high), x, high)
    x = builder.select(builder.fcmp_ordered(">", x, low), x, low)
    moved = multiply_add(builder, x, _number(kind, -_LOG2_E), _number(kind, _ROUNDER))
    n = builder.fsub(moved, _number(kind, _ROUNDER))
    r = multiply_add(builder, n, _number(kind, -_LN2_HIGH), builder.fneg(x))
    r = multiply_add(builder, n, _number(kind, -_LN2_LOW), r)
    # by pairs: a chain of additions would be as long as what the processor can look ahead
    zeroth, first, second, third, fourth = (_number(kind, coefficient) for coefficient in _POLYNOMIAL)
    square = builder.fmul(r, r)
    upper = multiply_add(builder, fourth, square, multiply_add(builder, third, r, second))
    p = multiply_add(builder, upper, square, multiply_add(builder, first, r, zeroth))
    p = multiply_add(builder, p, square, builder.fadd(r, _number(kind, 1.0)))
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
            gate_base, up_base, target_base = pointers(context, builder, sig, args, 0, 1, 2)
            kind = sig.args[2].dtype
            rows = Rows(builder, kind)

            def body(offset, vectors):
                gates, ups = (rows.read(base, offset, kind, vectors) for base in (gate_base, up_base))
                rows.write([gated(builder, *pair) for pair in zip(gates, ups, strict=True)], target_base, offset, kind)

            rows.over(args[3], body)
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


# not inlined like the others: a caller's own values leave no registers for the constants, which are then read anew for every vector
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
