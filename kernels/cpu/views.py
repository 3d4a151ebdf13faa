"""torch tensors as what compiled loops take: NumPy arrays, or addresses, which cost a tenth of the time to hand over."""

import numpy as np
import torch
from numba import carray, njit, types
from numba.extending import intrinsic

_SEEN_AS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
KINDS: dict[torch.dtype, np.generic] = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
"""dtype -> a value of the type that its elements have in compiled code (see `matrix`)"""
CACHE_KINDS: dict[torch.dtype, np.generic] = {**KINDS, torch.int8: np.int8(0), torch.float8_e4m3fn: np.uint8(0)}
"""The same for what a KV cache may hold."""


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A view of a float32 tensor, of a bfloat16 tensor as uint16, of a float8 tensor as uint8; integer tensors as they are. No copy."""
    seen_as = _SEEN_AS.get(tensor.dtype)
    return tensor.numpy() if seen_as is None else tensor.view(seen_as).numpy()


def at(tensor: torch.Tensor) -> int:
    """Address of a contiguous tensor; a view with gaps, whose place a copy cannot take, is a ValueError."""
    if not tensor.is_contiguous():
        raise ValueError(f"needs a contiguous tensor, strides are {tensor.stride()}")
    return tensor.data_ptr()


@intrinsic
def _pointer(typingctx, kind, address):
    pointer = types.CPointer(kind)

    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[1], context.get_value_type(pointer))

    return pointer(kind, types.int64), codegen


@njit
def matrix(kind, address, num_rows, width):
    """The array [num_rows, width] at an address: `tensor.data_ptr()` of a contiguous tensor, kind: KINDS of its dtype.

    Compiled code only. Nothing keeps the memory alive and nothing checks its size: the caller holds the tensor and vouches for its shape.
    """
    return carray(_pointer(kind, address), (num_rows, width))


@njit
def vector(kind, address, size):
    """The array [size] at an address; see `matrix`."""
    return carray(_pointer(kind, address), (size,))
