"""The GGUF container: metadata and tensor table, read from a memory map (github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Own code because the `gguf` package's reader takes 4 s over a 49,152-token vocabulary; the block formats are decoded by that package.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark.runtime.spec.errors import InputError, UnsupportedError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# ggml type id -> (name, elements per block, bytes per block): what the gguf package decodes. Left out: Q8_1 and Q8_K, which are formats of
# intermediate results, Q1_0, which it cannot decode, and the integer types
BLOCK_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
SUPPORTED_TYPES = tuple(name for name, _, _ in BLOCK_TYPES.values())
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table.

    shape: row-major (the file stores the fastest dimension first). offset: in bytes, from the start of the file.
    """

    type_id: int
    shape: tuple[int, ...]
    offset: int

    @property
    def type_name(self) -> str:
        return BLOCK_TYPES[self.type_id][0]


class _Cursor:
    """Reads little-endian values one after another; running past the end means that the file was cut off."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.offset = data, 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        end = self.offset + length
        if end > len(self.data):
            raise struct.error("a text runs past the end of the file")
        raw = self.data[self.offset : end]
        self.offset = end
        return raw.decode("utf-8", errors="replace")  # a broken token shows as one that no merge knows

    def value(self, type_id: int) -> Any:
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id])
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            raise struct.error(f"unknown metadata type {type_id}")
        element, count = self.scalar("I"), self.scalar("Q")
        if element not in _SCALARS:
            return [self.value(element) for _ in range(count)]
        dtype = np.dtype("<" + {"?": "u1"}.get(_SCALARS[element], _SCALARS[element]).replace("Q", "u8").replace("q", "i8"))
        array = np.frombuffer(self.data, dtype, count, self.offset)
        self.offset += array.nbytes
        return array.tolist()


class GgufFile:
    """Metadata, tensor table and raw tensor bytes of one GGUF file.

    Raises InputError for a damaged file, UnsupportedError for a version, byte order or tensor type that is not read. A part of a split
    checkpoint is a file like any other here (see gguf_parts).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise InputError(f"'{path}' cannot be read ({error})", "check the file") from error
        try:
            self._parse(_Cursor(self._map))
        except (struct.error, ValueError, OverflowError, MemoryError) as error:
            raise InputError(f"'{path}' is damaged or not complete ({error})", "download it again") from error

    def _parse(self, cursor: _Cursor) -> None:
        if self._map[:4] != MAGIC:
            raise InputError(f"'{self.path}' is no GGUF file", "give a .gguf file or a checkpoint directory")
        cursor.offset = 4
        version = cursor.scalar("I")
        if version not in VERSIONS:
            order = " (or big-endian byte order)" if version & 0xFFFF == 0 else ""
            raise UnsupportedError(f"'{self.path}' has GGUF version {version}{order}, supported: {', '.join(map(str, VERSIONS))}")
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        table = {}
        for _ in range(num_tensors):
            name = cursor.string()
            shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))
            table[name] = (tuple(reversed(shape)), cursor.scalar("I"), cursor.scalar("Q"))
        alignment = int(self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        start = -(-cursor.offset // alignment) * alignment
        self._check_types({name: type_id for name, (_, type_id, _) in table.items()})
        self.tensors = {name: GgufTensor(type_id, shape, start + offset) for name, (shape, type_id, offset) in table.items()}
        for name, tensor in self.tensors.items():
            if tensor.offset + self.num_bytes(tensor) > len(self._map):
                raise struct.error(f"tensor {name} runs past the end of the file")

    def _check_types(self, types: dict[str, int]) -> None:
        unknown = sorted({type_id for type_id in types.values() if type_id not in BLOCK_TYPES})
        if not unknown:
            return
        from gguf import GGMLQuantizationType

        names = {kind.value: kind.name for kind in GGMLQuantizationType}
        found = ", ".join(names.get(type_id, f"type {type_id}") for type_id in unknown)
        raise UnsupportedError(
            f"'{self.path}' holds tensors of type {found}, supported: {', '.join(SUPPORTED_TYPES)}", "get the model in one of those"
        )

    def num_bytes(self, tensor: GgufTensor) -> int:
        """Bytes of a tensor in the file. Raises ValueError when its rows are no whole number of blocks."""
        name, block, width = BLOCK_TYPES[tensor.type_id]
        if tensor.shape and tensor.shape[-1] % block:
            raise ValueError(f"rows of {tensor.shape[-1]} elements are no whole number of {name} blocks")
        return math.prod(tensor.shape) // block * width

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor, uint8 [rows, bytes per row], as a view of the memory map."""
        tensor = self.tensors[name]
        data = np.frombuffer(self._map, np.uint8, self.num_bytes(tensor), tensor.offset)
        rows = data.size // (data.size // max(1, int(np.prod(tensor.shape[:-1])))) if data.size else 0
        return data.reshape(rows, -1)

    def decode(self, name: str) -> np.ndarray:
        """A tensor as float32 in its shape."""
        shape = self.tensors[name].shape
        return self.decode_rows(name, 0, math.prod(shape[:-1])).reshape(shape)

    def decode_rows(self, name: str, first_row: int, num_rows: int) -> np.ndarray:
        """Rows of a tensor (counted over all its dimensions but the last) as float32 [num_rows, K], and no others.

        Decoded a slice at a time, so that temporaries stay small.
        """
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        raw = self.raw(name)[first_row : first_row + num_rows]
        kind = GGMLQuantizationType(tensor.type_id)
        out = np.empty((raw.shape[0], tensor.shape[-1]), np.float32)
        step = max(1, (1 << 20) // tensor.shape[-1])
        for row in range(0, raw.shape[0], step):
            out[row : row + step] = dequantize(raw[row : row + step], kind)
        return out
