"""One token's heads: rotated in place, keys and values stored in the cache, 16 numbers at a time."""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from dspark.kernels.cpu.elementwise_rows import scale_vectors, squares
from dspark.kernels.cpu.llvm import BYTES, HALVES, I8, LINE_BYTES, WORDS, Loop, call, constant, load, prefetch_line
from dspark.kernels.cpu.row_vectors import narrow_bf16, pointers, store_floats
from dspark.kernels.cpu.simd import FLOAT, I32, I64, LANES, VECTOR, load_vector, multiply_add, store, widen
from dspark.kernels.kv_cache import FP8_LIMIT, INT8_LIMIT

CODES = ir.VectorType(I8, LANES)
CODE_TYPES = types.int8, types.uint8


def _limited(builder, value, limit):
    """Between -limit and limit; NaN becomes 0."""
    value = builder.select(builder.fcmp_ordered("ord", value, value), value, constant(VECTOR, 0.0))
    for predicate, end in ((">", -limit), ("<", limit)):
        edge = constant(VECTOR, end)
        value = builder.select(builder.fcmp_ordered(predicate, value, edge), value, edge)
    return value


def _int8_codes(builder, value):
    """16 floats as int8, to nearest even, between -127 and 127. NaN becomes 0."""
    rounded = call(builder, "llvm.nearbyint.v16f32", [_limited(builder, value, INT8_LIMIT)], VECTOR)
    return builder.trunc(builder.fptosi(rounded, WORDS), CODES)


def _fp8_codes(builder, value):
    """16 floats as float8 (e4m3fn), to nearest even, between -448 and 448. NaN becomes 0."""

    def word(number):
        return constant(WORDS, number)

    limited = _limited(builder, value, FP8_LIMIT)
    bits = builder.and_(builder.bitcast(limited, WORDS), word(0x7FFFFFFF))
    size = builder.bitcast(bits, VECTOR)
    tiny = builder.fcmp_ordered("<", size, constant(VECTOR, 0.015625))
    ruler = constant(VECTOR, 16384.0)  # its last mantissa bit stands for 2**-9, of which tiny numbers are multiples
    tiny_code = builder.sub(builder.bitcast(builder.fadd(size, ruler), WORDS), builder.bitcast(ruler, WORDS))
    odd = builder.and_(builder.lshr(bits, word(20)), word(1))
    code = builder.lshr(builder.add(builder.add(bits, odd), word(0x7FFFF)), word(20))
    code = builder.select(tiny, tiny_code, builder.sub(code, word(120 << 3)))
    sign = builder.select(builder.fcmp_ordered("<", limited, constant(VECTOR, 0.0)), word(0x80), word(0))
    return builder.trunc(builder.or_(code, sign), CODES)


def _narrowed(builder, value, element_type):
    """16 floats as an array of this type holds them (float32, bfloat16 as uint16, int8, float8 as uint8)."""
    if element_type == types.int8:
        return _int8_codes(builder, value)
    if element_type == types.uint8:
        return _fp8_codes(builder, value)
    return narrow_bf16(builder, value) if element_type == types.uint16 else value


@intrinsic
def _norm_heads(typingctx, row, first, num_heads, head_dim, weight, eps):
    """What `elementwise_rows.norm_row` does to each of num_heads >= 1 heads, of head_dim numbers from row[first] on, in place."""

    def codegen(context, builder, sig, args):
        _, first_v, num_heads_v, dim, _, eps_v = args
        row_base, weight_base = pointers(context, builder, sig, args, 0, 4)
        kind, vectors = sig.args[0].dtype, builder.lshr(dim, I64(4))
        width = builder.sitofp(dim, FLOAT)
        heads = Loop(builder, num_heads_v)
        head = builder.gep(row_base, [builder.add(first_v, builder.mul(heads.index, dim))])
        mean = builder.fdiv(squares(builder, head, kind, vectors), width)
        root = call(builder, "llvm.sqrt.f32", [builder.fadd(mean, eps_v)], FLOAT)
        scale = builder.fdiv(ir.Constant(FLOAT, 1.0), root)
        scale_vectors(builder, head, weight_base, scale, head, (kind, sig.args[4].dtype, kind), vectors)
        heads.close()
        return context.get_dummy_value()

    integer = types.int64
    return types.void(row, integer, integer, integer, weight, types.float32), codegen


@intrinsic
def _rotate_vectors(typingctx, row, num_heads, head_dim, half, cos, sin, num_vectors):
    """Half-split rotation in place of the pairs (d, half + d) with d < 16 * num_vectors of each head."""

    def codegen(context, builder, sig, args):
        _, num_heads_v, dim, half_v, _, _, count = args
        row_base, cos_base, sin_base = pointers(context, builder, sig, args, 0, 4, 5)
        kind = sig.args[0].dtype
        pieces = Loop(builder, count)
        offset = builder.mul(pieces.index, I64(LANES))
        cosine, sine = (load_vector(builder, builder.gep(base, [offset]), types.float32) for base in (cos_base, sin_base))
        heads = Loop(builder, num_heads_v)
        first = builder.gep(row_base, [builder.add(builder.mul(heads.index, dim), offset)])
        second = builder.gep(first, [half_v])
        a, b = (load_vector(builder, place, kind) for place in (first, second))
        # one product of each pair is rounded before the sum, so that it is clear which of the two is fused
        store_floats(builder, multiply_add(builder, a, cosine, builder.fneg(builder.fmul(b, sine))), first, kind)
        store_floats(builder, multiply_add(builder, b, cosine, builder.fmul(a, sine)), second, kind)
        heads.close()
        pieces.close()
        return context.get_dummy_value()

    integer = types.int64
    return types.void(row, integer, integer, integer, cos, sin, integer), codegen


def _store_intrinsic(scattered: bool):
    """cache[start + d * stride] = row[offset + d] for d < 16 * num_vectors, without the stride where not scattered. In a cache of 8 bits
    each number is divided by scales[scales_offset + d] first."""

    @intrinsic
    def store_vectors(typingctx, row, offset, scales, scales_offset, cache, start, stride, num_vectors):
        def codegen(context, builder, sig, args):
            _, offset_v, _, scales_at, _, start_v, stride_v, count = args
            row_base, scales_base, cache_base = pointers(context, builder, sig, args, 0, 2, 4)
            source_type, target_type = sig.args[0].dtype, sig.args[4].dtype
            loop = Loop(builder, count)
            index = builder.mul(loop.index, I64(LANES))
            source = builder.gep(row_base, [builder.add(offset_v, index)])
            if source_type == target_type:
                codes = load(builder, source, HALVES if source_type == types.uint16 else VECTOR)
            else:
                value = load_vector(builder, source, source_type)
                if target_type in CODE_TYPES:
                    scale = builder.gep(scales_base, [builder.add(scales_at, index)])
                    value = builder.fdiv(value, load_vector(builder, scale, types.float32))
                codes = _narrowed(builder, value, target_type)
            if scattered:
                place = builder.gep(cache_base, [builder.add(start_v, builder.mul(index, stride_v))])
                for i in range(LANES):
                    builder.store(builder.extract_element(codes, I32(i)), place)
                    place = builder.gep(place, [stride_v])
            else:
                place = builder.gep(cache_base, [builder.add(start_v, index)])
                builder.store(codes, builder.bitcast(place, codes.type.as_pointer()), align=1)
            loop.close()
            return context.get_dummy_value()

        integer = types.int64
        return types.void(row, integer, scales, integer, cache, integer, integer, integer), codegen

    return store_vectors


_store_contiguous, _store_scattered = _store_intrinsic(False), _store_intrinsic(True)


@intrinsic
def _expect_store(typingctx, array, offset):
    """Ask for the cache line of array[offset]; an address past the end does no harm."""

    def codegen(context, builder, sig, args):
        (base,) = pointers(context, builder, sig, args, 0)
        prefetch_line(builder, builder.bitcast(builder.gep(base, [args[1]]), BYTES), I64(0))
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def expect_token(slot, k_flat, v_flat, shape):
    """Ask for the cache lines that a token is about to be stored in: there is one for every few dimensions of a key, and they are seldom
    near, since the rest of the model came by in between."""
    _, num_kv_heads, block_size, head_dim = shape
    if slot < 0:
        return
    page, offset = slot // block_size * num_kv_heads * head_dim * block_size, slot % block_size
    line = LINE_BYTES // k_flat.itemsize
    for i in range(page + offset, page + num_kv_heads * head_dim * block_size, max(line, block_size)):
        _expect_store(k_flat, i)
    for h in range(num_kv_heads):
        for d in range(0, head_dim, line):
            _expect_store(v_flat, page + (h * block_size + offset) * head_dim + d)


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def _rotate(row, num_heads, head_dim, cos, sin):
    """Half-split rotation in place of the first 2 * len(cos) numbers of each head."""
    half = cos.shape[0]
    whole = half // LANES
    if whole:
        _rotate_vectors(row, num_heads, head_dim, half, cos, sin, whole)
    for i in range(whole * LANES, half):
        for first in range(i, num_heads * head_dim, head_dim):
            a, b = widen(row[first]), widen(row[first + half])
            store(row, first, a * cos[i] - b * sin[i])
            store(row, first + half, b * cos[i] + a * sin[i])


@njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
def rope_store_row(row, cos, sin, q_norm, k_norm, eps, k_flat, v_flat, slot, k_scales, v_scales, shape):
    """One token: norm (when there are norm weights) and rotate q and k in place, store k dimension-major and v in plain order.

    row: its heads [(num_heads + 2 * num_kv_heads) * head_dim], 16 divides head_dim. Scales: [num_kv_heads * head_dim], empty for a cache
    that is not of 8 bits. A token whose slot is negative is stored nowhere. shape: num_heads, num_kv_heads, block_size, head_dim.
    """
    num_heads, num_kv_heads, block_size, head_dim = shape
    if q_norm.shape[0]:
        if num_heads:  # a draft head stores keys and values of features, which have no queries
            _norm_heads(row, 0, num_heads, head_dim, q_norm, eps)
        _norm_heads(row, num_heads * head_dim, num_kv_heads, head_dim, k_norm, eps)
    _rotate(row, num_heads + num_kv_heads, head_dim, cos, sin)
    if slot < 0:
        return
    block, offset, vectors = slot // block_size, slot % block_size, head_dim // LANES
    for h in range(num_kv_heads):
        channel, page = h * head_dim, (block * num_kv_heads + h) * head_dim * block_size
        key, value = num_heads * head_dim + channel, (num_heads + num_kv_heads) * head_dim + channel
        _store_scattered(row, key, k_scales, channel, k_flat, page + offset, block_size, vectors)
        _store_contiguous(row, value, v_scales, channel, v_flat, page + offset * head_dim, 1, vectors)
