"""Vector building blocks for the compiled CPU kernels.

Numba's loops vectorise well where a loop is a plain map or sum; the inner loops of attention need several accumulators held in registers,
so these two are written as LLVM vector code. They lower to whatever the machine has (AVX-512, AVX2, NEON).

bfloat16 arrays are seen as uint16: the upper half of a float32. In 8-bit caches an int8 array is what it says, a uint8 array holds float8
numbers (e4m3fn: sign, 4 bits of exponent with bias 7, 3 of mantissa).
"""

from __future__ import annotations

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from dspark.kernels.kv_cache import FP8_LIMIT, INT8_LIMIT

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


@njit
def round_int8(value):
    """float32 -> int8, to nearest even, between -127 and 127. NaN becomes 0."""
    limited = min(max(value, np.float32(-INT8_LIMIT)), np.float32(INT8_LIMIT)) if value == value else np.float32(0.0)
    return np.int8(np.rint(limited))


@njit
def round_fp8(value):
    """float32 -> float8 (e4m3fn) as uint8, to nearest even, between -448 and 448. NaN becomes 0."""
    size = min(abs(value), np.float32(FP8_LIMIT)) if value == value else np.float32(0.0)
    if size < np.float32(0.015625):  # a multiple of 2**-9: the sum's last mantissa bit stands for just that
        code = float_bits(size + np.float32(16384.0)) - float_bits(np.float32(16384.0))
    else:
        bits = float_bits(size)
        code = ((bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)) - np.uint32(120 << 3)
    return np.uint8(code | np.uint32(0x80)) if value < np.float32(0.0) else np.uint8(code)


def store(array, index, value):
    """array[index] = value, rounded to the array's type (float32, bfloat16 as uint16, int8, float8 as uint8). Compiled code only."""
    raise NotImplementedError


@overload(store)
def _store(array, index, value):
    if array.dtype == types.uint16:

        def put(array, index, value):
            array[index] = round_bf16(value)
    elif array.dtype == types.int8:

        def put(array, index, value):
            array[index] = round_int8(value)
    elif array.dtype == types.uint8:

        def put(array, index, value):
            array[index] = round_fp8(value)
    else:

        def put(array, index, value):
            array[index] = np.float32(value)

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


@intrinsic
def _prefetch_line(typingctx, array, offset):
    """Ask for the cache line of array[offset]; an address past the end does no harm."""

    def codegen(context, builder, sig, args):
        pointer = builder.bitcast(element_pointer(context, builder, sig.args[0], *args), ir.IntType(8).as_pointer())
        function_type = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0i8")
        builder.call(function, [pointer, I32(0), I32(3), I32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@njit
def prefetch(array, offset, num_elements):
    """Ask for num_elements elements from offset on, 64 bytes (a line) at a time: the pages of a sequence lie anywhere in memory, so the
    machine cannot guess the next one."""
    per_line = 64 // array.itemsize
    for i in range(0, num_elements, per_line):
        _prefetch_line(array, offset + i)


def _scores_intrinsic(num_rows: int):
    """The score micro-kernel for a fixed number of query rows; see `scores_16_keys`."""

    @intrinsic
    def scores(typingctx, q, q_offset, q_stride, keys, key_offset, key_stride, head_dim, out, out_offset, out_stride):
        signature = types.void(q, types.int64, types.int64, keys, types.int64, types.int64, types.int64, out, types.int64, types.int64)

        def codegen(context, builder, sig, args):
            q_v, q_off, q_str, k_v, k_off, k_str, dim, out_v, out_off, out_str = args
            zero = ir.Constant(VECTOR, [0.0] * LANES)
            q_rows = [
                element_pointer(context, builder, sig.args[0], q_v, builder.add(q_off, builder.mul(q_str, I64(r)))) for r in range(num_rows)
            ]
            k_base = element_pointer(context, builder, sig.args[3], k_v, k_off)
            entry = builder.block
            loop, done = builder.append_basic_block("dims"), builder.append_basic_block("dims_done")
            builder.branch(loop)
            builder.position_at_end(loop)
            d = builder.phi(I64)
            d.add_incoming(I64(0), entry)
            # two accumulators a row, for even and odd dimensions: one alone waits for the latency of its own additions
            sums = [builder.phi(VECTOR) for _ in range(2 * num_rows)]
            for phi in sums:
                phi.add_incoming(zero, entry)
            new = []
            for half in range(2):
                index = builder.add(d, I64(half))
                key = load_vector(builder, builder.gep(k_base, [builder.mul(index, k_str)], inbounds=True), sig.args[3].dtype)
                for r in range(num_rows):
                    value = broadcast(builder, builder.load(builder.gep(q_rows[r], [index], inbounds=True)))
                    new.append(multiply_add(builder, value, key, sums[half * num_rows + r]))
            following = builder.add(d, I64(2))
            d.add_incoming(following, loop)
            for phi, value in zip(sums, new, strict=True):
                phi.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed("<", following, dim), loop, done)
            builder.position_at_end(done)
            for r in range(num_rows):
                pointer = element_pointer(context, builder, sig.args[7], out_v, builder.add(out_off, builder.mul(out_str, I64(r))))
                builder.store(builder.fadd(new[r], new[num_rows + r]), builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
            return context.get_dummy_value()

        return signature, codegen

    return scores


def _values_intrinsic(num_rows: int, num_vectors: int):
    """The value micro-kernel for a fixed number of rows and of 16-wide pieces of the head; see `add_values`."""

    @intrinsic
    def values(typingctx, probs, p_offset, p_stride, stored, v_offset, v_stride, num_keys, out, out_offset, out_stride):
        signature = types.void(
            probs, types.int64, types.int64, stored, types.int64, types.int64, types.int64, out, types.int64, types.int64
        )

        def codegen(context, builder, sig, args):
            p_v, p_off, p_str, v_v, v_off, v_str, keys, out_v, out_off, out_str = args
            p_rows = [
                element_pointer(context, builder, sig.args[0], p_v, builder.add(p_off, builder.mul(p_str, I64(r)))) for r in range(num_rows)
            ]
            v_base = element_pointer(context, builder, sig.args[3], v_v, v_off)
            out_pointers = []
            for r in range(num_rows):
                row = element_pointer(context, builder, sig.args[7], out_v, builder.add(out_off, builder.mul(out_str, I64(r))))
                out_pointers += [
                    builder.bitcast(builder.gep(row, [I64(c * LANES)], inbounds=True), VECTOR.as_pointer()) for c in range(num_vectors)
                ]
            start = [builder.load(pointer, align=4) for pointer in out_pointers]
            entry = builder.block
            loop, done = builder.append_basic_block("keys"), builder.append_basic_block("keys_done")
            builder.branch(loop)
            builder.position_at_end(loop)
            j = builder.phi(I64)
            j.add_incoming(I64(0), entry)
            sums = [builder.phi(VECTOR) for _ in out_pointers]
            for phi, value in zip(sums, start, strict=True):
                phi.add_incoming(value, entry)
            row_base = builder.gep(v_base, [builder.mul(j, v_str)], inbounds=True)
            pieces = [
                load_vector(builder, builder.gep(row_base, [I64(c * LANES)], inbounds=True), sig.args[3].dtype) for c in range(num_vectors)
            ]
            new = []
            for r in range(num_rows):
                weight = broadcast(builder, builder.load(builder.gep(p_rows[r], [j], inbounds=True)))
                new += [multiply_add(builder, weight, pieces[c], sums[r * num_vectors + c]) for c in range(num_vectors)]
            following = builder.add(j, I64(1))
            j.add_incoming(following, loop)
            for phi, value in zip(sums, new, strict=True):
                phi.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed("<", following, keys), loop, done)
            builder.position_at_end(done)
            for pointer, value in zip(out_pointers, new, strict=True):
                builder.store(value, pointer, align=4)
            return context.get_dummy_value()

        return signature, codegen

    return values


_scores_1, _scores_2, _scores_3, _scores_4 = (_scores_intrinsic(rows) for rows in (1, 2, 3, 4))
_PIECES = {1: 4, 2: 4, 3: 4, 4: 4} if WIDE_REGISTERS else {1: 4, 2: 2, 3: 2, 4: 1}
"""16-wide pieces of the head that `add_values` holds sums of, by rows: what the registers have room for."""
_P1, _P2, _P3, _P4 = (16 * pieces for pieces in _PIECES.values())
_values_1, _values_2, _values_3, _values_4 = (_values_intrinsic(rows, 1) for rows in (1, 2, 3, 4))
_values_1x, _values_2x, _values_3x, _values_4x = (_values_intrinsic(rows, pieces) for rows, pieces in _PIECES.items())


@njit
def scores_16_keys(num_rows, q, q_offset, q_stride, keys, key_offset, key_stride, head_dim, out, out_offset, out_stride):
    """out[r, 0:16] = sum over d of q[r, d] * keys[d, 0:16] for up to 4 rows. Flat arrays with element offsets and row strides.

    keys is dimension-major: 16 neighbouring keys of one dimension lie together. head_dim is even.
    """
    if num_rows == 4 and not WIDE_REGISTERS:
        _scores_2(q, q_offset, q_stride, keys, key_offset, key_stride, head_dim, out, out_offset, out_stride)
        q_offset, out_offset, num_rows = q_offset + 2 * q_stride, out_offset + 2 * out_stride, 2
    if num_rows == 1:
        _scores_1(q, q_offset, q_stride, keys, key_offset, key_stride, head_dim, out, out_offset, out_stride)
    elif num_rows == 2:
        _scores_2(q, q_offset, q_stride, keys, key_offset, key_stride, head_dim, out, out_offset, out_stride)
    elif num_rows == 3:
        _scores_3(q, q_offset, q_stride, keys, key_offset, key_stride, head_dim, out, out_offset, out_stride)
    else:
        _scores_4(q, q_offset, q_stride, keys, key_offset, key_stride, head_dim, out, out_offset, out_stride)


@njit
def add_values(num_rows, probs, p_offset, p_stride, values, v_offset, v_stride, num_keys, head_dim, out, out_offset, out_stride):
    """out[r, d] += sum over j < num_keys of probs[r, j] * values[j, d] for up to 4 rows. head_dim is a multiple of 16, num_keys >= 1."""
    d = 0
    while d < head_dim:
        left = head_dim - d
        if num_rows == 1:
            if left >= _P1:
                _values_1x(probs, p_offset, p_stride, values, v_offset + d, v_stride, num_keys, out, out_offset + d, out_stride)
                d += _P1
                continue
            _values_1(probs, p_offset, p_stride, values, v_offset + d, v_stride, num_keys, out, out_offset + d, out_stride)
        elif num_rows == 2:
            if left >= _P2:
                _values_2x(probs, p_offset, p_stride, values, v_offset + d, v_stride, num_keys, out, out_offset + d, out_stride)
                d += _P2
                continue
            _values_2(probs, p_offset, p_stride, values, v_offset + d, v_stride, num_keys, out, out_offset + d, out_stride)
        elif num_rows == 3:
            if left >= _P3:
                _values_3x(probs, p_offset, p_stride, values, v_offset + d, v_stride, num_keys, out, out_offset + d, out_stride)
                d += _P3
                continue
            _values_3(probs, p_offset, p_stride, values, v_offset + d, v_stride, num_keys, out, out_offset + d, out_stride)
        else:
            if left >= _P4:
                _values_4x(probs, p_offset, p_stride, values, v_offset + d, v_stride, num_keys, out, out_offset + d, out_stride)
                d += _P4
                continue
            _values_4(probs, p_offset, p_stride, values, v_offset + d, v_stride, num_keys, out, out_offset + d, out_stride)
        d += 16
