"""Fixed-width records in a file: the line index of a job and its table of results.

Read and written by windows and never mapped: resident memory does not grow with the file, and a full disk is an error of a write,
not a SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

WINDOW = 8192
"""Records per window of a pass over a whole file."""

LINE = np.dtype(
    [("offset", "<u8"), ("number", "<u8"), ("length", "<u4"), ("flags", "<u4"), ("key_hi", "<u8"), ("key_lo", "<u8"), ("id", "<u8")]
)
"""One input line that is not blank. offset and length: its bytes without surrounding white space and byte order mark. number: 1-based,
blank lines counted. key: xxh3_128 of those bytes. id: xxh3_64 of its effective custom_id."""

FLAG_TOO_LONG = 1
"""The line is longer than any request may be; it is never read again (length is 0)."""

SLOT = np.dtype([("offset", "<u8"), ("length", "<u4"), ("state", "<u4")])
"""Where the result of a line lies."""

STATE_NONE, STATE_OK, STATE_FAILED = 0, 1, 2


class FixedFile:
    """Records of one dtype. Positions and counts are in records. Raises OSError as the file system does."""

    def __init__(self, path: Path, dtype: np.dtype, create: bool = False) -> None:
        self.path = path
        self.dtype = dtype
        flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if create else 0)
        self._fd = os.open(path, flags, 0o666)
        self._count = os.fstat(self._fd).st_size // dtype.itemsize

    def __len__(self) -> int:
        return self._count

    def append(self, records: bytes | np.ndarray) -> None:
        """Add whole records at the end."""
        data = records.tobytes() if isinstance(records, np.ndarray) else records
        write_all(self._fd, data, self._count * self.dtype.itemsize)
        self._count += len(data) // self.dtype.itemsize

    def resize(self, count: int) -> None:
        """Set the length; new records are zero and take no room on disk until they are written."""
        os.ftruncate(self._fd, count * self.dtype.itemsize)
        self._count = count

    def read(self, start: int, count: int) -> np.ndarray:
        """A copy of up to `count` records."""
        count = max(0, min(count, self._count - start))
        data = os.pread(self._fd, count * self.dtype.itemsize, start * self.dtype.itemsize)
        return np.frombuffer(bytearray(data), self.dtype)

    def write(self, start: int, records: np.ndarray | bytes) -> None:
        """Overwrite records in place."""
        data = records.tobytes() if isinstance(records, np.ndarray) else records
        write_all(self._fd, data, start * self.dtype.itemsize)

    def windows(self, size: int = WINDOW) -> Iterator[tuple[int, np.ndarray]]:
        """(start, records) over the whole file."""
        for start in range(0, self._count, size):
            yield start, self.read(start, size)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def write_all(fd: int, data: bytes, offset: int) -> None:
    """pwrite until everything is written; a short write is followed by the error that explains it."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written
