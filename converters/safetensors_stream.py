"""A safetensors file written tensor by tensor (github.com/huggingface/safetensors#format).

`safetensors.torch.save_file` wants every tensor in memory. Here the header's room is reserved from the names, the data follow as they come,
and the header is written last, padded with spaces as the format allows.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_CODES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
}
_ENTRY_BYTES = 192  # dtype, shape and offsets of one tensor as JSON, with room to spare
_ALIGNMENT = 64
_ODD_SIZE = 16


class SafetensorsStream:
    """One file being written. names: every tensor that may be added (others do not fit the reserved header)."""

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        room = 64 + sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names)
        self._data_start = -(-(8 + room) // _ALIGNMENT) * _ALIGNMENT
        self._entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._deferred: list[tuple[str, torch.Tensor]] = []
        self.num_bytes = 0
        self._file = path.open("wb")
        self._file.seek(self._data_start)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append a contiguous CPU tensor.

        One whose size would leave the next tensor unaligned (a small uint8 table) is kept back until the end: the format allows no gaps.
        """
        if tensor_bytes(tensor).nbytes % _ODD_SIZE:
            self._deferred.append((name, tensor))
        else:
            self._append(name, tensor)

    def close(self) -> None:
        """Write the header and bring the file to disk."""
        for name, tensor in sorted(self._deferred, key=lambda pair: -pair[1].element_size()):
            self._append(name, tensor)
        header = json.dumps(self._entries, separators=(",", ":")).encode()
        size = self._data_start - 8
        if len(header) > size:
            raise AssertionError(f"safetensors header of {len(header)} bytes outgrew its room of {size}")
        self._file.seek(0)
        self._file.write(size.to_bytes(8, "little") + header.ljust(size))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abort(self) -> None:
        """Close the file as it is; what the buffer still holds need not reach a full disk."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _append(self, name: str, tensor: torch.Tensor) -> None:
        data = tensor_bytes(tensor)
        end = self.num_bytes + data.nbytes
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._entries[name] = {"dtype": _CODES[dtype], "shape": list(tensor.shape), "data_offsets": [self.num_bytes, end]}
        self._file.write(data)
        self.num_bytes = end


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, row-major, without a copy."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().data
