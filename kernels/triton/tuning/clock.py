"""How long a launch takes on a device, as a model would see it: its weights not in the cache, its launches queued."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

Run = Callable[[int], Any]
"""Turn -> one run, on the inputs of that turn."""


class Clock(Protocol):
    """What a tuner measures with."""

    def now(self) -> float:
        """Seconds since any moment."""

    def seconds(self, run: Run, sets: int, num_bytes: int) -> float:
        """Of one run. sets: turns that read different memory; num_bytes: what all of them read. Raises what a run raises."""

    def check(self) -> None:
        """Wait for the device. Raises when it is lost: nothing can be measured any more."""


COLD_CACHES = 3
"""Turns that together read so many times the L2 find nothing of theirs in it when they come round again."""
_MEASURED_S = 0.02
_LEAST_TURNS, _MOST_TURNS = 5, 40


class CudaClock:
    """CUDA events around a replayed graph, which has no time of the host in it: of all turns where they read several times the L2, else of
    one, behind something else that fills the L2."""

    def __init__(self, cache_bytes: int) -> None:
        self._cache_bytes = max(cache_bytes, 1 << 20)
        self._flush: torch.Tensor | None = None

    def now(self) -> float:
        return time.monotonic()

    def check(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, run: Run, sets: int, num_bytes: int) -> float:
        rotates = num_bytes >= COLD_CACHES * self._cache_bytes
        turns = range(sets if rotates else 1)
        run(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for turn in turns:
                run(turn)
        first = self._time(graph, not rotates)
        count = min(max(int(_MEASURED_S / max(first, 1e-9)), _LEAST_TURNS), _MOST_TURNS)
        return statistics.median(self._time(graph, not rotates) for _ in range(count)) / len(turns)

    def _time(self, graph: torch.cuda.CUDAGraph, flushed: bool) -> float:
        if flushed:
            if self._flush is None:
                self._flush = torch.empty(COLD_CACHES * self._cache_bytes, dtype=torch.uint8, device="cuda")
            self._flush.zero_()  # takes longer than the host needs to queue what follows
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
