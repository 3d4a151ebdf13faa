"""How long something takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_FLUSH_BYTES = 256 << 20
"""More than the L2 cache of any GPU: writing so much leaves nothing else in it."""


def seconds_of(run: Callable[[], Any], device: str, turns: int = 7, cold: bool = True) -> float:
    """Median seconds of a call, after one that compiles. cold: nothing of its inputs is in the cache, on a GPU."""
    run()
    if device != "cuda":
        return statistics.median(_by_the_clock(run) for _ in range(min(turns, 2)))
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device) if cold else None
    times = []
    for _ in range(turns):
        if flush is not None:
            flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _by_the_clock(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
