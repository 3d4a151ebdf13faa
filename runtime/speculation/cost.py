"""What a step costs by the number of its tokens: measured, and kept true while a job runs."""

from __future__ import annotations

import bisect
from typing import Any

WEIGHT = 0.1
"""Share of a new measurement in a point's estimate."""


class StepCost:
    """Seconds of a step with B tokens whose logits are all wanted: straight lines between measured points, never falling.

    Beyond the last point it goes on with the slope before it. Without two points nothing is known, and nothing is estimated.
    """

    def __init__(self, points: dict[int, float] | None = None) -> None:
        self._seconds: dict[int, float] = {}
        self._order: list[int] = []
        for tokens, seconds in (points or {}).items():
            self.observe(tokens, seconds)

    @property
    def is_known(self) -> bool:
        return len(self._order) >= 2

    def observe(self, tokens: int, seconds: float) -> None:
        """Take one measurement in. A step disturbed by other work moves its point by a tenth only."""
        if tokens in self._seconds:
            before = self._seconds[tokens]
            self._seconds[tokens] = before + WEIGHT * (min(seconds, 3 * before) - before)
        else:
            self._seconds[tokens] = seconds
            bisect.insort(self._order, tokens)

    def estimate(self, tokens: int) -> float:
        """Seconds of a step of so many tokens."""
        order = self._order
        place = bisect.bisect_left(order, tokens)
        if place < len(order) and order[place] == tokens:
            return self._rising(place)
        low = min(max(place - 1, 0), len(order) - 2)
        first, second = order[low], order[low + 1]
        start, end = self._rising(low), self._rising(low + 1)
        return max(start + (end - start) * (tokens - first) / (second - first), start * tokens / first if tokens < first else start)

    def _rising(self, place: int) -> float:
        """The point's estimate, at least those of smaller steps: a larger step that seems cheaper is noise."""
        return max(self._seconds[tokens] for tokens in self._order[: place + 1])

    def record(self) -> dict[str, Any]:
        """tokens -> milliseconds, JSON-ready."""
        return {str(tokens): round(1e3 * self._seconds[tokens], 4) for tokens in self._order}
