"""One run per output: an advisory lock on a file inside the journal directory.

flock, not a lock file's existence: the kernel drops it when the holder dies, so nothing is ever left locked. The directory goes away with
the finished job, so a waiter may win a lock on a file that is gone: it looks again whether the file it locked is the one in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from dspark.runtime.spec.errors import InputError, LockedError

LOCK_NAME = "lock"
HEADER_NAME = "job.json"
"""Its presence makes the directory an unfinished job (see `fingerprint.JobHeader`)."""

POLL_S = 0.1


class JobLock:
    """Held from `acquire` to `release`. Raises LockedError when another run holds it for longer than the timeout."""

    def __init__(self, directory: Path, output: Path) -> None:
        self.directory = directory
        self.output = output
        self._fd = -1
        self._removed = False

    def acquire(self, timeout_s: float) -> None:
        """Create the directory if need be and take the lock. Raises LockedError, or InputError when the place cannot be written."""
        deadline = time.monotonic() + timeout_s
        while not self._try():
            if time.monotonic() >= deadline:
                raise LockedError(f"another run{self._holder()} is writing '{self.output}'", "wait for it, or type --lock-timeout SECONDS")
            time.sleep(POLL_S)

    def _holder(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            return f" (process {int((self.directory / LOCK_NAME).read_text())})"
        return ""

    def _try(self) -> bool:
        path = self.directory / LOCK_NAME
        try:
            self.directory.mkdir(exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            if not self.directory.parent.is_dir():
                raise InputError(
                    f"'{self.directory.parent}' is no directory, so '{self.output}' cannot be written", "make it first"
                ) from None
            return False  # the holder has just removed the directory
        except OSError as error:
            raise InputError(f"'{error.filename}' cannot be written ({error.strerror})", "check the output's directory") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            in_place = os.stat(path)
            mine = os.fstat(fd)
            if (in_place.st_dev, in_place.st_ino) != (mine.st_dev, mine.st_ino):
                raise FileNotFoundError
            os.ftruncate(fd, 0)
            with contextlib.suppress(OSError):  # the number is for the message only; a full disk does not stop a lock
                os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        except (BlockingIOError, FileNotFoundError):
            os.close(fd)
            return False
        self._fd = fd
        return True

    def remove_directory(self) -> None:
        """Remove the directory while the lock is held, the lock file last; from then on the output is anyone's. Only once."""
        if self._fd < 0 or self._removed:
            return
        self._removed = True
        names = sorted(self.directory.iterdir(), key=lambda path: (path.name == LOCK_NAME, path.name != HEADER_NAME))
        for path in names:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a waiter has just put a new lock file there: the directory is its own now
            self.directory.rmdir()

    def release(self) -> None:
        """Drop the lock; a directory that holds no job goes with it."""
        if self._fd >= 0:
            if not self._removed and not (self.directory / HEADER_NAME).exists():
                self.remove_directory()
            os.close(self._fd)
            self._fd = -1
