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
    return _parts(_packed(arrays, device).to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The arrays as `Places.take` takes them: one array of bytes, to be staged with others."""
    room = np.empty(_starts(arrays)[-1], np.uint8)
    _lay(arrays, room)
    return room


class Places:
    """Memory of the device for arrays of fixed dtypes and shapes, filled in one copy each time. tensors: the arrays there."""

    def __init__(self, arrays: Sequence[np.ndarray], device: str) -> None:
        self._device = device
        self._memory = torch.zeros(_starts(arrays)[-1], dtype=torch.uint8, device=device)
        self.tensors = _parts(self._memory, arrays)

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        """Copy arrays of the same dtypes and shapes there, behind the work that was started before."""
        self._memory.copy_(_packed(arrays, self._device), non_blocking=True)

    def take(self, packed: torch.Tensor) -> None:
        """The same of arrays that were packed by `pack` and are on the device."""
        self._memory.copy_(packed)


def wait_for(device: str) -> None:
    """Wait until what was started on the device's current stream is done."""
    if device.startswith("cuda"):
        torch.cuda.current_stream(device).synchronize()


def _starts(arrays: Sequence[np.ndarray]) -> list[int]:
    """First byte of each array in a packed buffer, and the buffer's size."""
    starts = [0]
    for array in arrays:
        starts.append(-(-(starts[-1] + array.nbytes) // ALIGNMENT) * ALIGNMENT)
    return starts


def _packed(arrays: Sequence[np.ndarray], device: str) -> torch.Tensor:
    packed = torch.empty(_starts(arrays)[-1], dtype=torch.uint8, pin_memory=device.startswith("cuda"))
    _lay(arrays, packed.numpy())
    return packed


def _lay(arrays: Sequence[np.ndarray], room: np.ndarray) -> None:
    for start, array in zip(_starts(arrays), arrays, strict=False):
        room[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _parts(packed: torch.Tensor, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    parts = []
    for start, array in zip(_starts(arrays), arrays, strict=False):
        dtype = torch.from_numpy(array[:0]).dtype
        parts.append(packed[start : start + array.nbytes].view(dtype).view(array.shape))
    return parts
