"""Compiled CPU kernels are kept on the disk for the next run. Where that cannot be, they are compiled again: no run fails for it.

numba's own answer is an exception: at a function's definition when no directory may be written (an installation that is read-only and a
home that is not there), and after compiling when the disk is full.

numba keeps what it compiled until the function's own file changes. But most of a kernel comes from its neighbours: inner loops, roundings,
constants. A checkout in which one of them was changed would go on computing as before, so here all the files count.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

logger = logging.getLogger("dspark")

_KERNELS = Path(__file__).parent
COMPILED_FOLDERS = (
    _KERNELS,
    _KERNELS / "cpu",
    _KERNELS.parent / "runtime" / "sampling",
    _KERNELS.parent / "converters" / "quantizers",
)
"""Where compiled functions are, and what they are made of."""


def prepare_cache() -> None:
    """To be called before the first `@njit(cache=True)`. Harmless when called again, or without numba."""
    try:
        from numba.core.caching import Cache, _SourceFileBackedLocatorMixin
        from numba.core.dispatcher import Dispatcher
    except ImportError:
        return
    _count_neighbours(_SourceFileBackedLocatorMixin)
    _forgive(Cache, "save_overload", OSError)
    _forgive(Dispatcher, "enable_caching", RuntimeError)  # "cannot cache function: no locator available"


def _forgive(owner: type, name: str, error: type[Exception]) -> None:
    """Have a method that returns nothing log this exception instead of raising it."""
    method = getattr(owner, name)
    if hasattr(method, "__wrapped__"):
        return

    @functools.wraps(method)
    def forgiving(*arguments: Any) -> None:
        try:
            method(*arguments)
        except error as reason:
            logger.debug("a compiled kernel is not kept for the next run: %s", reason)

    setattr(owner, name, forgiving)


def sources_digest(folders: Iterable[Path]) -> bytes:
    """Of the names and contents of the Python files right in these folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.glob("*.py")):
            content = file.read_bytes()
            digest.update(f"{folder.name}/{file.name} {len(content)}\n".encode() + content)
    return digest.digest()


@functools.cache
def _own_digest() -> bytes:
    return sources_digest(COMPILED_FOLDERS)


def _count_neighbours(locator: type) -> None:
    """Have what says whether a function was changed since it was compiled speak for all own files."""
    method = locator.get_source_stamp  # type: ignore[attr-defined]
    if hasattr(method, "__wrapped__"):
        return

    @functools.wraps(method)
    def stamp(self: Any) -> Any:
        found = method(self)
        if Path(self._py_file).parent not in COMPILED_FOLDERS:
            return found
        return hashlib.sha256(repr(found).encode() + _own_digest()).digest()

    locator.get_source_stamp = stamp  # type: ignore[attr-defined]
