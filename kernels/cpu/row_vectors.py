"""Pieces of 16 or 32 numbers of a row: read to float32 vectors, walked over, written back rounded.

A pair of vectors of bfloat16 numbers is read as 16 words of 32 bits, whose upper halves are one vector and whose lower halves the other:
half as many steps as widening two vectors of neighbours. Only what is computed number by number, or summed, can take it so.
"""

from __future__ import annotations

from llvmlite import binding, ir
from numba import types

from dspark.kernels.cpu.llvm import BFLOAT, BFLOATS, HALVES, ROUNDS_BF16, WORDS, Loop, call, constant, load, rounded_bf16
from dspark.kernels.cpu.simd import I16, I32, I64, LANES, VECTOR, element_pointer, load_vector

_SHORT_ROUNDING = ROUNDS_BF16 and bool(binding.get_host_cpu_features().get("avx512dq"))
"""Whether one instruction rounds to bfloat16, and one more finds subnormal numbers, which the first takes for zeros."""
_SUBNORMAL = 1 << 5
_PAIR = ir.VectorType(I16, 2 * LANES)
_INTERLEAVED = ir.Constant(ir.VectorType(I32, 2 * LANES), [place for lane in range(LANES) for place in (lane, LANES + lane)])
_UPPER, _LOWER_BITS = 0xFFFF0000, 16


def pointers(context, builder, sig, args, *positions):
    """Where the arrays among an intrinsic's arguments begin."""
    return [element_pointer(context, builder, sig.args[i], args[i], I64(0)) for i in positions]


def _if_subnormal(builder, values, short, long):
    """short, or long() where one of the values is a subnormal number."""
    lanes, found = ir.VectorType(ir.IntType(1), LANES), None
    for value in values:
        here = call(builder, "llvm.x86.avx512.fpclass.ps.512", [value, I32(_SUBNORMAL)], lanes)
        found = here if found is None else builder.or_(found, here)
    before = builder.block
    with builder.if_then(builder.icmp_unsigned("!=", builder.bitcast(found, I16), I16(0)), likely=False):
        other, inside = long(), builder.block
    result = builder.phi(short.type)
    result.add_incoming(short, before)
    result.add_incoming(other, inside)
    return result


def _halves(builder, value):
    return builder.bitcast(builder.fptrunc(value, BFLOATS), HALVES)


def narrow_bf16(builder, value):
    """16 floats to bfloat16 (as uint16), to nearest even, as torch rounds: NaN stays NaN, subnormal numbers stay what they are."""
    if not _SHORT_ROUNDING:
        return rounded_bf16(builder, value)
    return _if_subnormal(builder, [value], _halves(builder, value), lambda: rounded_bf16(builder, value))


def _rounded_words(builder, value):
    """16 floats to bfloat16, each in the upper half of a word; what is in the lower half means nothing."""
    bits = builder.bitcast(value, WORDS)
    odd = builder.and_(builder.lshr(bits, constant(WORDS, _LOWER_BITS)), constant(WORDS, 1))
    rounded = builder.add(bits, builder.add(odd, constant(WORDS, 0x7FFF)))
    return builder.select(builder.fcmp_unordered("uno", value, value), constant(WORDS, 0x7FC00000), rounded)


def _narrow_pair(builder, lower, upper):
    """Two vectors to the lower and the upper halves of 16 words."""

    def by_words():
        shifted = builder.lshr(_rounded_words(builder, lower), constant(WORDS, _LOWER_BITS))
        return builder.or_(shifted, builder.and_(_rounded_words(builder, upper), constant(WORDS, _UPPER)))

    if not _SHORT_ROUNDING:
        return by_words()
    both = call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", [upper, lower], ir.VectorType(BFLOAT, 2 * LANES))
    both = builder.bitcast(both, _PAIR)
    short = builder.bitcast(builder.shuffle_vector(both, both, _INTERLEAVED), WORDS)
    return _if_subnormal(builder, [lower, upper], short, by_words)


def _widen_pair(builder, words):
    lower = builder.shl(words, constant(WORDS, _LOWER_BITS))
    return [builder.bitcast(bits, VECTOR) for bits in (lower, builder.and_(words, constant(WORDS, _UPPER)))]


class Rows:
    """Reads and writes pieces of rows, one or two vectors long, whose numbers are of these kinds (float32, or bfloat16 as uint16)."""

    def __init__(self, builder, *kinds) -> None:
        self._builder = builder
        self.in_halves = all(kind == types.uint16 for kind in kinds)  # else the lanes of one kind would not be those of the other

    def read(self, base, offset, kind, num_vectors):
        builder = self._builder
        pointer = builder.gep(base, [offset])
        if num_vectors == 2 and self.in_halves:
            return _widen_pair(builder, load(builder, pointer, WORDS))
        return [load_vector(builder, builder.gep(pointer, [I64(LANES * j)]), kind) for j in range(num_vectors)]

    def write(self, values, base, offset, kind):
        """Gives back what was stored, as floats."""
        builder = self._builder
        pointer = builder.gep(base, [offset])
        if len(values) == 2 and self.in_halves:
            words = _narrow_pair(builder, *values)
            builder.store(words, builder.bitcast(pointer, WORDS.as_pointer()), align=2)
            return _widen_pair(builder, words)
        return [store_floats(builder, value, builder.gep(pointer, [I64(LANES * j)]), kind) for j, value in enumerate(values)]

    def over(self, num_vectors, body) -> None:
        """body(offset of a piece's first number, its number of vectors) for pairs of vectors, and for the one that may be left."""
        builder = self._builder
        pairs = builder.lshr(num_vectors, I64(1))
        with builder.if_then(builder.icmp_signed(">", pairs, I64(0))):
            loop = Loop(builder, pairs)
            body(builder.mul(loop.index, I64(2 * LANES)), 2)
            loop.close()
        with builder.if_then(builder.trunc(num_vectors, ir.IntType(1))):
            body(builder.mul(pairs, I64(2 * LANES)), 1)


def store_floats(builder, value, pointer, kind):
    """16 floats to where numbers of this kind are; gives back what was stored, as floats."""
    if kind == types.uint16:
        halves = narrow_bf16(builder, value)
        builder.store(halves, builder.bitcast(pointer, HALVES.as_pointer()), align=2)
        return builder.bitcast(builder.shl(builder.zext(halves, WORDS), constant(WORDS, _LOWER_BITS)), VECTOR)
    builder.store(value, builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
    return value


def lane_sum(builder, vector):
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
