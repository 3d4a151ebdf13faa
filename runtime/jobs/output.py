"""Files that appear whole or not at all: written beside their place, made durable, renamed."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from types import TracebackType

from dspark.runtime.spec.errors import InputError, UsageError

BUFFER_BYTES = 1 << 20


def output_path(path: Path, what: str) -> Path:
    """The real place of an output (links followed). Raises UsageError or InputError when no file can stand there."""
    path = Path(os.path.realpath(path))
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise UsageError(f"{what} '{path}' is {'a directory' if path.is_dir() else 'no regular file'}, allowed: a file", "give a file name")
    if not path.parent.is_dir():
        raise InputError(f"'{path.parent}' is no directory, so {what} '{path.name}' cannot be written", f"type: mkdir -p '{path.parent}'")
    return path


def sync_directory(directory: Path) -> None:
    """Make renames in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class AtomicFile:
    """Context manager: write, then `publish`; leaving without it removes what was written.

    The temporary name is fixed, so a killed run's remains are overwritten by the next; the mode of a file that is replaced is kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.dspark-tmp")
        self._published = False
        self._file = open(self.temporary, "wb", buffering=BUFFER_BYTES)  # noqa: SIM115 - this object is the context manager

    def write(self, data: bytes) -> None:
        """Append. Raises OSError (disk full)."""
        self._file.write(data)

    def seal(self) -> None:
        """Make the content durable, still under the temporary name."""
        self._file.flush()
        if self.path.exists():
            os.fchmod(self._file.fileno(), stat.S_IMODE(self.path.stat().st_mode))
        os.fsync(self._file.fileno())

    def publish(self) -> None:
        """`seal`, then put the file in its place."""
        self.seal()
        os.replace(self.temporary, self.path)
        self._published = True
        sync_directory(self.path.parent)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):  # closing flushes: on a full disk that fails again, after the error that counts
            self._file.close()
        if not self._published:
            self.temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file's content. Raises OSError."""
    with AtomicFile(path) as file:
        file.write(data)
        file.publish()
