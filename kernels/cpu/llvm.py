"""What writing vector code by hand needs: loops, calls of the processor's instructions, loads and stores, the bfloat16 type.

Numba vectorises plain loops to 256 bits and knows no matrix instructions; the inner loops of products are therefore written with these.
Functions take an llvmlite builder, pointers and values, and emit code where the builder stands.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from dspark.kernels.cpu.simd import I16, I32, I64, LANES, element_pointer

I8 = ir.IntType(8)
BYTES = I8.as_pointer()
WORDS = ir.VectorType(I32, LANES)
HALVES = ir.VectorType(I16, LANES)
LINE_BYTES = 64


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT = _BFloat()
BFLOATS = ir.VectorType(BFLOAT, LANES)
ROUNDS_BF16 = bool(binding.get_host_cpu_features().get("avx512bf16"))
"""Whether one instruction rounds floats to bfloat16 (elsewhere LLVM would call a function that is not there)."""


def has_instructions(capability: str, feature: str) -> bool:
    """Whether this CPU has an extension (by torch's name) and the compiler makes code for it (by LLVM's)."""
    return bool(torch.cpu.get_capabilities().get(capability)) and bool(binding.get_host_cpu_features().get(feature))


def call(builder, name, arguments, result=None):
    """Call an LLVM intrinsic by name; its type follows from the arguments."""
    signature = ir.FunctionType(result or ir.VoidType(), [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def bytes_at(context, builder, array_type, array, offset):
    """Pointer to element `offset` of a contiguous array, to be counted in bytes."""
    return builder.bitcast(element_pointer(context, builder, array_type, array, offset), BYTES)


def load(builder, pointer, vector):
    """A vector from any address."""
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=1)


def all_lanes(builder, word):
    """A 32-bit integer in every lane."""
    undefined = ir.Constant(WORDS, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, word, I32(0)), undefined, ir.Constant(WORDS, [0] * LANES))


def constant(vector, value):
    """The same value in every lane."""
    return ir.Constant(vector, [value] * vector.count)


def store_rounded(builder, value, pointer, element_type):
    """Store 16 floats, rounded to nearest even where the elements are bfloat16 (seen as uint16)."""
    if element_type == types.uint16:
        value = builder.bitcast(builder.fptrunc(value, BFLOATS), HALVES) if ROUNDS_BF16 else rounded_bf16(builder, value)
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=2)


def rounded_bf16(builder, value):
    """The upper halves of 16 floats, to nearest even; NaN stays NaN."""
    bits, half = builder.bitcast(value, WORDS), constant(WORDS, 16)
    odd = builder.and_(builder.lshr(bits, half), constant(WORDS, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(WORDS, 0x7FFF))), half)
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", value, value), constant(WORDS, 0x7FC0), rounded), HALVES)


def prefetch_line(builder, pointer, offset, level=1):
    """Ask for the cache line at pointer + offset bytes; an address past the end does no harm. level: of the cache it shall come into; the
    second has several times as many lines on their way as the first."""
    call(builder, "llvm.prefetch.p0i8", [builder.gep(pointer, [offset]), I32(0), I32(4 - level), I32(1)])


class Loop:
    """`for index in range(count)`, count >= 1, around what is emitted up to `close`. values: those that each round replaces."""

    def __init__(self, builder, count, carried: Sequence = ()) -> None:
        self._builder, self._count = builder, count
        entry = builder.block
        self._body, self._done = builder.append_basic_block("loop"), builder.append_basic_block("loop_done")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self.index = builder.phi(I64)
        self.index.add_incoming(I64(0), entry)
        self.values = []
        for start in carried:
            phi = builder.phi(start.type)
            phi.add_incoming(start, entry)
            self.values.append(phi)

    def close(self, new: Sequence = ()) -> None:
        """End the round; `new` are the values that the next one begins with, and that stand after the last."""
        builder = self._builder
        following, latch = builder.add(self.index, I64(1)), builder.block  # another block than the first where loops are nested
        self.index.add_incoming(following, latch)
        for phi, value in zip(self.values, new, strict=True):
            phi.add_incoming(value, latch)
        builder.cbranch(builder.icmp_signed("<", following, self._count), self._body, self._done)
        builder.position_at_end(self._done)


@intrinsic
def address(typingctx, array):
    """Where an array's first element lies."""

    def codegen(context, builder, sig, args):
        return builder.ptrtoint(element_pointer(context, builder, sig.args[0], args[0], I64(0)), I64)

    return types.int64(array), codegen


@njit(cache=True, nogil=True, error_model="numpy")
def aligned_bytes(num_bytes):
    """Uninitialised bytes that begin on a cache line: a tile that does not takes twice as long to load."""
    room = np.empty(num_bytes + LINE_BYTES, np.uint8)
    return room[-address(room) % LINE_BYTES :][:num_bytes]
