"""A clock for the tuner that says what a test tells it, and shapes that take no kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dspark.kernels.triton.gemm_tiles import GemmTile
from dspark.kernels.triton.tuning.tuner import Bench, Subject


class FakeClock:
    """Each measurement takes a second. cost: what was run last -> seconds it is said to take."""

    def __init__(self, cost: Callable[[Any], float] = lambda choice: 1.0) -> None:
        self.time = 0.0
        self.last: Any = None
        self.cost = cost
        self.measured: list[Any] = []
        self.lost = False

    def now(self) -> float:
        return self.time

    def seconds(self, run: Callable[[int], Any], sets: int, num_bytes: int) -> float:
        run(0)
        self.time += 1.0
        self.measured.append(self.last)
        return self.cost(self.last)

    def check(self) -> None:
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")


def fake_subject(
    key: str,
    clock: FakeClock,
    untuned: GemmTile,
    candidates: Sequence[GemmTile],
    result: Callable[[GemmTile], torch.Tensor] = lambda tile: torch.ones(4, 4),
    exact: bool = False,
) -> Subject:
    """A subject whose runs are noted by the clock. result: of a tile; may raise."""

    def run(tile: GemmTile, turn: int) -> torch.Tensor:
        clock.last = tile
        return result(tile)

    return Subject(key, untuned, lambda around: candidates, lambda: Bench(run, 1, 100), exact)
