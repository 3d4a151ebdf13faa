"""What a step costs by the number of its tokens: measured, and kept true while a job runs."""

from __future__ import annotations

import bisect
from collections import deque
from typing import Any

SAMPLES = 9
"""Latest measurements of a size that are kept. Their lower quartile counts: other work only ever adds to a step."""
REACH = 1.6
"""How many times the largest measured step a step may be: beyond, an estimate is no more than a hope."""


class StepCost:
    """Seconds of a step with B tokens whose logits are all wanted: straight lines between measured points.

    A point costs at most what a larger one does: a small step that seems dearer was disturbed. Beyond the last point it goes on with the
    slope before it, as far as `reach`. Without two points nothing is known, and nothing is estimated.
    """

    def __init__(self, points: dict[int, float] | None = None) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._order: list[int] = []
        self._seconds: list[float] = []  # of each size in _order; made anew after a measurement
        for tokens, seconds in (points or {}).items():
            self.observe(tokens, seconds)

    @property
    def is_known(self) -> bool:
        return len(self._order) >= 2

    def observe(self, tokens: int, seconds: float) -> None:
        """Take one measurement in."""
        if tokens not in self._samples:
            self._samples[tokens] = deque(maxlen=SAMPLES)
            bisect.insort(self._order, tokens)
        self._samples[tokens].append(seconds)
        self._seconds = []

    def reach(self, tokens: int) -> int:
        """The largest step that may be tried where one of so many tokens is planned anyway."""
        return max(int(REACH * self._order[-1]) if self._order else 0, tokens) + 1

    def estimate(self, tokens: int) -> float:
        """Seconds of a step of so many tokens."""
        if not self._seconds:
            self._seconds = self._envelope()
        order, seconds = self._order, self._seconds
        place = bisect.bisect_left(order, tokens)
        if place < len(order) and order[place] == tokens:
            return seconds[place]
        low = min(max(place - 1, 0), len(order) - 2)
        start, end, first, second = seconds[low], seconds[low + 1], order[low], order[low + 1]
        return max(start + (end - start) * (tokens - first) / (second - first), start * tokens / first if tokens < first else start)

    def _envelope(self) -> list[float]:
        """Each size's estimate, at most that of any larger size."""
        found, least = [], float("inf")
        for tokens in reversed(self._order):
            samples = sorted(self._samples[tokens])
            least = min(least, samples[len(samples) // 4])
            found.append(least)
        return found[::-1]

    def record(self) -> dict[str, Any]:
        """tokens -> milliseconds, JSON-ready."""
        return {str(tokens): round(1e3 * self.estimate(tokens), 4) for tokens in self._order} if self.is_known else {}
