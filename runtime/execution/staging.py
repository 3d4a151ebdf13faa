"""Host arrays -> device tensors, all of a step in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT = 16
"""Bytes: every array begins where any dtype may."""


def stage(arrays: Sequence[np.ndarray], device: str) -> list[torch.Tensor]:
    """Tensors of the arrays' dtypes and shapes on the device. On a CPU they are the arrays' own memory.

    Elsewhere the arrays are packed into one buffer of pinned memory and copied once, without waiting for the copy: the allocator of pinned
    memory gives the buffer to nobody else before it is read.
    """
    if device == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = [0]
    for array in arrays:
        starts.append(-(-(starts[-1] + array.nbytes) // ALIGNMENT) * ALIGNMENT)
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.startswith("cuda"))
    room = packed.numpy()
    for start, array in zip(starts, arrays, strict=False):
        room[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = packed.to(device, non_blocking=True)
    return [_view(there[start : start + array.nbytes], array) for start, array in zip(starts, arrays, strict=False)]


def _view(part: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    dtype = torch.from_numpy(array[:0] if array.ndim else array).dtype
    return part.view(dtype).view(array.shape)
