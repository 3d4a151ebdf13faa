"""How much was drafted and kept over a run, in a bounded number of stretches."""

from __future__ import annotations

from typing import Any

MOST = 128
"""Stretches kept; when there are more, neighbours are joined and each covers twice the steps."""
COLUMNS = ("steps", "sequences", "drafted", "accepted")


class Timeline:
    """Sums over stretches of equally many steps: sequences that drew a token, draft tokens verified for them, and those kept."""

    def __init__(self) -> None:
        self._stretches: list[list[int]] = []
        self._stride = 1

    def add(self, sequences: int, drafted: int) -> None:
        """One step begins."""
        if not self._stretches or self._stretches[-1][0] == self._stride:
            if len(self._stretches) == MOST:
                pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
                self._stretches = [[a + b for a, b in zip(first, second, strict=True)] for first, second in pairs]
                self._stride *= 2
            self._stretches.append([0, 0, 0, 0])
        entry = self._stretches[-1]
        entry[0] += 1
        entry[1] += sequences
        entry[2] += drafted

    def kept(self, accepted: int) -> None:
        """Tokens of a draft of the latest step were accepted."""
        if self._stretches:
            self._stretches[-1][3] += accepted

    def record(self) -> dict[str, Any]:
        """JSON-ready: a column for each of COLUMNS, a row for each stretch."""
        return {"columns": list(COLUMNS), "rows": [list(entry) for entry in self._stretches]}
