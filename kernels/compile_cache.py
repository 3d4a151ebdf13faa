"""Compiled CPU kernels are kept on the disk for the next run. Where that cannot be, they are compiled again: no run fails for it.

numba's own answer is an exception: at a function's definition when no directory may be written (an installation that is read-only and a
home that is not there), and after compiling when the disk is full.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger("dspark")


def make_cache_optional() -> None:
    """To be called before the first `@njit(cache=True)`. Harmless when called again, or without numba."""
    try:
        from numba.core.caching import Cache
        from numba.core.dispatcher import Dispatcher
    except ImportError:
        return
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
