"""What a drafter's own confidence is worth: learned from which of its tokens were accepted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dspark.runtime.speculation.acceptance import MOST_PRELOADED
from dspark.runtime.speculation.draft import Draft, Verified

BUCKETS = 12
DEEPEST = 8
"""Depths from here on are one."""
WEIGHT = 4.0
"""Trials that the coarser estimate counts for."""
DECAY_AT = 2048


class Confidence:
    """P(a token is accepted | those before it were), from the confidence that its drafter gave it.

    An estimate for bucket, depth and kind leans on the one for bucket and kind while it has seen little, and that on the confidence itself.
    kind: tokens drawn at random are accepted less often than their draft is sure of its best one.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int, int], list[float]] = {}

    def survival(self, kind: str, confidences: tuple[float, ...]) -> tuple[float, ...]:
        """The estimates for the nodes of a chain."""
        found = []
        for depth, value in enumerate(confidences):
            estimate = value
            for key in _keys(kind, depth, value):
                accepted, tried = self._counts.get(key, (0.0, 0.0))
                estimate = (accepted + WEIGHT * estimate) / (tried + WEIGHT)
            found.append(min(max(estimate, 1e-6), 1.0))
        return tuple(found)

    def learn(self, kind: str, confidences: tuple[float, ...], draft: Draft, verified: Verified) -> None:
        """Count the accepted nodes of a chain, and the one where it broke off, by the confidences that they were given."""
        accepted = verified.num_accepted
        for depth in range(min(accepted + 1, len(draft))):
            for key in _keys(kind, depth, confidences[depth]):
                entry = self._counts.setdefault(key, [0.0, 0.0])
                entry[0] += depth < accepted
                entry[1] += 1.0
                if entry[1] > DECAY_AT:
                    entry[0] /= 2
                    entry[1] /= 2

    def preload(self, record: dict[str, list[list[float]]]) -> None:
        """Begin with what an earlier run's `record` says of each kind and bucket."""
        for kind, rows in record.items():
            for value, rate, tried in rows:
                weight = min(float(tried), MOST_PRELOADED)
                self._counts[kind, -1, round(value * BUCKETS)] = [rate * weight, weight]

    def record(self) -> dict[str, Any]:
        """kind -> for each bucket of confidence [from, acceptance, tried], JSON-ready."""
        found: dict[str, list[list[float]]] = {}
        for (kind, depth, bucket), (accepted, tried) in sorted(self._counts.items()):
            if depth < 0:
                found.setdefault(kind, []).append([round(bucket / BUCKETS, 3), round(accepted / tried, 4), int(tried)])
        return found


def _keys(kind: str, depth: int, value: float) -> Iterator[tuple[str, int, int]]:
    """From coarse to fine."""
    bucket = min(int(value * BUCKETS), BUCKETS - 1)
    yield kind, -1, bucket
    yield kind, min(depth, DEEPEST), bucket
