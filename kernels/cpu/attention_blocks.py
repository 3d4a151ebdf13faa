"""The two inner loops of attention as LLVM vector code: several sums are held in registers, and memory is asked for what comes next while
they add up. They lower to whatever the machine has (AVX-512, AVX2, NEON).
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from dspark.kernels.cpu.llvm import BYTES, LINE_BYTES, WORDS, Loop, all_lanes, call, constant, prefetch_line
from dspark.kernels.cpu.simd import FLOAT, I32, I64, LANES, VECTOR, WIDE_REGISTERS, broadcast, element_pointer, load_vector, multiply_add


def _ask_for(builder, address, num_bytes):
    """Emit requests for the cache lines of num_bytes from an address on, into the second cache; less than a line is one request."""
    pointer = builder.inttoptr(address, BYTES)
    for start in range(0, num_bytes, LINE_BYTES):
        prefetch_line(builder, pointer, I64(start), level=2)


def _scores_intrinsic(num_rows: int):
    """The score micro-kernel for a fixed number of query rows; see `scores_16_keys`."""

    @intrinsic
    def scores(typingctx, q, q_offset, q_stride, keys, key_offset, key_stride, head_dim, out, out_offset, out_stride, ahead, ahead_too):
        integer = types.int64
        signature = types.void(q, integer, integer, keys, integer, integer, integer, out, integer, integer, integer, integer)

        def codegen(context, builder, sig, args):
            q_v, q_off, q_str, k_v, k_off, k_str, dim, out_v, out_off, out_str, *streams = args
            key_bytes = LANES * sig.args[3].dtype.bitwidth // 8
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
            for stream in streams:
                _ask_for(builder, builder.add(stream, builder.mul(d, I64(key_bytes))), 2 * key_bytes)
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
    def values(typingctx, probs, p_offset, p_stride, stored, v_offset, v_stride, num_keys, out, out_offset, out_stride, ahead):
        integer = types.int64
        signature = types.void(probs, integer, integer, stored, integer, integer, integer, out, integer, integer, integer)

        def codegen(context, builder, sig, args):
            p_v, p_off, p_str, v_v, v_off, v_str, keys, out_v, out_off, out_str, stream = args
            key_bytes = num_vectors * LANES * sig.args[3].dtype.bitwidth // 8
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
            _ask_for(builder, builder.add(stream, builder.mul(j, I64(key_bytes))), key_bytes)
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
def scores_16_keys(
    num_rows, q, q_offset, q_stride, keys, key_offset, key_stride, head_dim, out, out_offset, out_stride, ahead, ahead_too
):  # fmt: skip
    """out[r, 0:16] = sum over d of q[r, d] * keys[d, 0:16] for up to 4 rows. Flat arrays with element offsets and row strides.

    keys is dimension-major: 16 neighbouring keys of one dimension lie together. head_dim is even. ahead, ahead_too: addresses of as many
    bytes as these keys have, to be asked for meanwhile, a line at a time: memory then works while the sums do.
    """
    if num_rows == 4 and not WIDE_REGISTERS:
        _scores_2(q, q_offset, q_stride, keys, key_offset, key_stride, head_dim, out, out_offset, out_stride, ahead, ahead_too)
        q_offset, out_offset, num_rows = q_offset + 2 * q_stride, out_offset + 2 * out_stride, 2
    if num_rows == 1:
        _scores_1(q, q_offset, q_stride, keys, key_offset, key_stride, head_dim, out, out_offset, out_stride, ahead, ahead_too)
    elif num_rows == 2:
        _scores_2(q, q_offset, q_stride, keys, key_offset, key_stride, head_dim, out, out_offset, out_stride, ahead, ahead_too)
    elif num_rows == 3:
        _scores_3(q, q_offset, q_stride, keys, key_offset, key_stride, head_dim, out, out_offset, out_stride, ahead, ahead_too)
    else:
        _scores_4(q, q_offset, q_stride, keys, key_offset, key_stride, head_dim, out, out_offset, out_stride, ahead, ahead_too)


@njit
def add_values(num_rows, probs, p_offset, p_stride, values, v_offset, v_stride, num_keys, head_dim, out, out_offset, out_stride, ahead):
    """out[r, d] += sum over j < num_keys of probs[r, j] * values[j, d] for up to 4 rows. head_dim is a multiple of 16, num_keys >= 1.

    ahead: see `scores_16_keys`.
    """
    d = 0
    while d < head_dim:
        left, v_at, out_at, skipped = head_dim - d, v_offset + d, out_offset + d, d * num_keys * values.itemsize
        coming = ahead + skipped
        if num_rows == 1:
            if left >= _P1:
                _values_1x(probs, p_offset, p_stride, values, v_at, v_stride, num_keys, out, out_at, out_stride, coming)
                d += _P1
                continue
            _values_1(probs, p_offset, p_stride, values, v_at, v_stride, num_keys, out, out_at, out_stride, coming)
        elif num_rows == 2:
            if left >= _P2:
                _values_2x(probs, p_offset, p_stride, values, v_at, v_stride, num_keys, out, out_at, out_stride, coming)
                d += _P2
                continue
            _values_2(probs, p_offset, p_stride, values, v_at, v_stride, num_keys, out, out_at, out_stride, coming)
        elif num_rows == 3:
            if left >= _P3:
                _values_3x(probs, p_offset, p_stride, values, v_at, v_stride, num_keys, out, out_at, out_stride, coming)
                d += _P3
                continue
            _values_3(probs, p_offset, p_stride, values, v_at, v_stride, num_keys, out, out_at, out_stride, coming)
        else:
            if left >= _P4:
                _values_4x(probs, p_offset, p_stride, values, v_at, v_stride, num_keys, out, out_at, out_stride, coming)
                d += _P4
                continue
            _values_4(probs, p_offset, p_stride, values, v_at, v_stride, num_keys, out, out_at, out_stride, coming)
        d += 16


def _larger(builder, a, b):
    """The larger of each pair; a where one of them is NaN."""
    return builder.select(builder.fcmp_unordered(">", a, b), a, b)


def _exp(builder, x):
    """`simd.exp_approx` of 16 numbers that are not above 0; NaN stays NaN."""

    def each(value):
        return constant(VECTOR, value)

    def times_plus(a, b, c):
        return multiply_add(builder, a, b, c)

    tiny = builder.fcmp_ordered("<=", x, each(-87.0))
    x = _larger(builder, x, each(-87.5))
    n = call(builder, "llvm.floor.v16f32", [times_plus(x, each(1.44269504088896341), each(0.5))], VECTOR)
    r = times_plus(n, each(2.12194440e-4), times_plus(n, each(-0.693359375), x))
    p = each(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = times_plus(p, r, each(coefficient))
    p = builder.fadd(times_plus(builder.fmul(p, r), r, r), each(1.0))
    bits = builder.shl(builder.add(builder.fptosi(n, WORDS), constant(WORDS, 127)), constant(WORDS, 23))
    return builder.select(tiny, each(0.0), builder.fmul(p, builder.bitcast(bits, VECTOR)))


@intrinsic
def softmax(typingctx, scores, offset, length, begin, end):
    """Softmax of row[begin:end] in place, row = scores[offset : offset + length] filled up to whole vectors; the rest of the row becomes 0.

    Numbers are added lane by lane, so a sum depends on where a row's keys stand modulo 16 and on nothing else of the row.
    """
    integer = types.int64

    def codegen(context, builder, sig, args):
        scores_v, offset_v, length_v, begin_v, end_v = args
        base = element_pointer(context, builder, sig.args[0], scores_v, offset_v)
        count = builder.sdiv(builder.add(length_v, I64(LANES - 1)), I64(LANES))
        lanes = ir.Constant(WORDS, list(range(LANES)))

        def place(loop):
            first = builder.mul(loop.index, I64(LANES))
            lane = builder.add(all_lanes(builder, builder.trunc(first, I32)), lanes)
            after = builder.icmp_signed(">=", lane, all_lanes(builder, builder.trunc(begin_v, I32)))
            before = builder.icmp_signed("<", lane, all_lanes(builder, builder.trunc(end_v, I32)))
            return builder.bitcast(builder.gep(base, [first]), VECTOR.as_pointer()), builder.and_(after, before)

        lowest, zero = constant(VECTOR, float("-inf")), constant(VECTOR, 0.0)
        loop = Loop(builder, count, [lowest])
        pointer, seen = place(loop)
        values = builder.select(seen, builder.load(pointer, align=4), lowest)
        largest = _larger(builder, values, loop.values[0])
        loop.close([largest])
        top = broadcast(builder, call(builder, "llvm.vector.reduce.fmax.v16f32", [largest], FLOAT))
        loop = Loop(builder, count, [zero])
        pointer, seen = place(loop)
        weights = builder.select(seen, _exp(builder, builder.fsub(builder.load(pointer, align=4), top)), zero)
        builder.store(weights, pointer, align=4)
        sums = builder.fadd(loop.values[0], weights)
        loop.close([sums])
        total = call(builder, "llvm.vector.reduce.fadd.v16f32", [FLOAT(0.0), sums], FLOAT)
        inverse = broadcast(builder, builder.fdiv(FLOAT(1.0), total))
        loop = Loop(builder, count)
        pointer, _ = place(loop)
        builder.store(builder.fmul(builder.load(pointer, align=4), inverse), pointer, align=4)
        loop.close()
        return context.get_dummy_value()

    return types.void(scores, integer, integer, integer, integer), codegen
