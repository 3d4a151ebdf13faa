"""The book of tiles of the GPU that is here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from dspark.kernels.triton.tuning.book import TileBook
from dspark.kernels.triton.tuning.cache import TileCache
from dspark.kernels.triton.tuning.choices import Tuned
from dspark.kernels.triton.tuning.limits import DeviceLimits, this_gpu
from dspark.kernels.triton.tuning.tables import table_for

logger = logging.getLogger("dspark")


def known_tiles(limits: DeviceLimits | None = None, directory: Path | None = None) -> TileBook:
    """What was measured of a GPU (default: of this one) in earlier runs, and what is shipped for its kind.

    A cache that cannot be read, or whose place is not known (a GPU machine where not all that dspark needs could be installed), is said in
    one line of warning, and changes nothing else.
    """
    limits = this_gpu() if limits is None else limits
    try:
        cache = TileCache.of(limits, directory)
    except ModuleNotFoundError as error:
        missing = f"there is no tile cache: {error.name} is not installed"
        logger.warning(missing)
        return TileBook(limits, table_for(limits), problem=missing)
    entries, problem = cache.load()
    if problem is not None:
        logger.warning(problem)
    return TileBook(limits, table_for(limits), entries, str(cache.path), problem)


def keep(book: TileBook, entries: Mapping[str, Tuned]) -> str | None:
    """Add what was measured to the book's cache file; None, or why that could not be."""
    if book.limits is None or book.cache is None:
        return "there is no cache file"
    problem = TileCache.of(book.limits, Path(book.cache).parent).save(entries)
    if problem is not None:
        logger.warning(problem)
    return problem
