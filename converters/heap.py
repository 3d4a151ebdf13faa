"""Memory that is freed goes back to the system: a walk over layers is to take a layer's memory, not the holes of all before it too.

glibc serves blocks below a threshold from a heap that seldom shrinks, and raises it to 32 MB once such blocks are freed, so that weights
of most layers come from there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_M_MMAP_THRESHOLD = -3  # malloc.h
_MAPPED_FROM = 1 << 20
_HIGHEST = 32 << 20
"""Where glibc's own adjustment ends, which a call of mallopt switches off: what a process that freed large blocks would have."""


@contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """Blocks from 1 MB on are mapped on their own inside the block. Nothing where the C library has no such switch (musl, macOS)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _HIGHEST)
