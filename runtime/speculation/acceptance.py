"""How often drafts are right: learned from what came of them, by source and by depth."""

from __future__ import annotations

from typing import Any

from dspark.runtime.speculation.draft import Draft, Verified

PRIOR_ACCEPTED, PRIOR_TRIED = 1.2, 2.0
"""What is believed before anything was seen, as if so many tokens had been tried."""
DECAY_AT = 2048
"""Trials after which old ones count half, so that a change in the job is noticed."""
MAX_DEPTH = 32
MOST_PRELOADED = 64.0
"""Trials of a rate that an earlier run's figures count for at most: the job may be another one."""


class Acceptance:
    """P(a draft token is accepted | the one before it was), for each source and depth (1 for the first token)."""

    def __init__(self, record: dict[str, Any] | None = None) -> None:
        """record: of an earlier run, to begin with."""
        self._counts: dict[str, list[list[float]]] = {}
        for source, entry in (record or {}).items():
            counts = self._counts.setdefault(source, [[0.0, 0.0] for _ in range(MAX_DEPTH)])
            for depth, (rate, tried) in enumerate(zip(entry["by_position"][:MAX_DEPTH], entry["tried"], strict=False)):
                weight = min(float(tried), MOST_PRELOADED)
                counts[depth] = [rate * weight, weight]

    def survival(self, source: str, length: int) -> list[float]:
        """The conditional probabilities of a chain of this length."""
        counts = self._counts.get(source)
        if counts is None:
            return [PRIOR_ACCEPTED / PRIOR_TRIED] * length
        rates: list[float] = []
        for depth in range(length):
            accepted, tried = counts[min(depth, MAX_DEPTH - 1)]
            before = rates[-1] if rates else PRIOR_ACCEPTED / PRIOR_TRIED
            rates.append((accepted + PRIOR_TRIED * before) / (tried + PRIOR_TRIED))  # little seen at a depth: as the depth before
        return rates

    def learn(self, draft: Draft, verified: Verified) -> None:
        """Count one draft: the accepted depths, and the one where it ended if it was not accepted to its end."""
        counts = self._counts.setdefault(draft.source, [[0.0, 0.0] for _ in range(MAX_DEPTH)])
        accepted = verified.num_accepted
        for depth in range(min(accepted + 1, draft.longest(), MAX_DEPTH)):
            entry = counts[depth]
            entry[0] += depth < accepted
            entry[1] += 1.0
            if entry[1] > DECAY_AT:
                entry[0] /= 2
                entry[1] /= 2

    def record(self) -> dict[str, Any]:
        """source -> acceptance by depth and how many tokens it rests on, JSON-ready."""
        return {
            source: {
                "by_position": [round(accepted / tried, 4) for accepted, tried in counts if tried],
                "tried": [int(tried) for _, tried in counts if tried],
            }
            for source, counts in sorted(self._counts.items())
        }
