"""Drafts from a drafter beside the model, asked for only where they are expected to pay for their own making."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.confidence import Confidence
from dspark.runtime.speculation.cost import StepCost
from dspark.runtime.speculation.draft import Draft, Verified
from dspark.runtime.speculation.planner import MIN_GAIN

AskDrafts = Callable[[list[Sequence], list[int]], list[Draft | None]]
"""sequences, most tokens of each -> drafts whose survival is the drafter's own confidence"""
PROBE_EVERY = 32
"""Of the looks at which drafting does not pay, one in so many drafts for a few sequences all the same."""
PROBE_SEQUENCES, PROBE_TOKENS = 4, 3
WEIGHT = 0.1
"""Share of a new measurement in an estimate."""
FIRST_GUESS = 0.6
"""Acceptance believed before a draft was seen."""


class DraftTimes:
    """Seconds of one round of drafting, per token of its longest draft, by the number of sequences."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe(self, sequences: int, seconds: float) -> None:
        """One round. A disturbed one, or one that caught up with a long prompt, moves the estimate by little."""
        size = 1 << max(sequences - 1, 0).bit_length()
        before = self._seconds.get(size)
        self._seconds[size] = seconds if before is None else before + WEIGHT * (min(seconds, 3 * before) - before)

    def estimate(self, sequences: int) -> float | None:
        """The least that the sizes seen speak for, None when there are none: more sequences cost at most in proportion, fewer no more. So
        a size whose first round caught up with long prompts is not believed for ever."""
        return min((seconds * max(1.0, sequences / size) for size, seconds in self._seconds.items()), default=None)

    def record(self) -> dict[str, float]:
        """sequences -> milliseconds, JSON-ready."""
        return {str(size): round(1e3 * seconds, 4) for size, seconds in sorted(self._seconds.items())}


class DrafterProposer:
    """See `Proposer`. ask: has the drafter draft. cost: of the target's steps. clock: seconds. always: draft whether it pays or not."""

    def __init__(
        self, name: str, max_tokens: int, ask: AskDrafts, cost: StepCost, clock: Callable[[], float], always: bool = False
    ) -> None:
        self.name, self.max_tokens = name, max_tokens
        self._ask, self._cost, self._clock, self._always = ask, cost, clock, always
        self._confidence, self._times = Confidence(), DraftTimes()
        self._given: dict[int, tuple[float, ...]] = {}
        self._chance = [FIRST_GUESS ** (depth + 1) for depth in range(max_tokens)]  # that a draft is accepted to this depth
        self._length = [1.0] * max_tokens  # that a draft goes on to this depth
        self._idle = 0
        self.num_rounds = self.num_declined = 0
        self.draft_s = 0.0

    def preload(self, acceptance: dict[str, Any], drafter: dict[str, Any]) -> None:
        """Begin with what an earlier run of the same drafter came to: `Acceptance.record` and what `metrics` gave."""
        self._confidence.preload(drafter.get("confidence", {}))
        for size, ms in drafter.get("draft_ms_per_token", {}).items():
            self._times.observe(int(size), ms / 1e3)
        entries = [entry for source, entry in acceptance.items() if source.startswith(self.name)]
        reached = 1.0
        for depth in range(self.max_tokens):
            seen = [(entry["by_position"][depth], entry["tried"][depth]) for entry in entries if depth < len(entry["tried"])]
            tried = sum(count for _, count in seen)
            reached *= sum(rate * count for rate, count in seen) / tried if tried else FIRST_GUESS
            if entries:
                self._chance[depth] = reached

    def promise(self, count: int) -> float:
        """Tokens that a draft of this proposer is expected to bring at so many sequences, none where drafting does not pay."""
        return sum(self._chance[: self._depth(count)])

    def propose(self, sequences: list[Sequence], rooms: list[int]) -> list[Draft | None]:
        """Drafts as long as pays on average at this number of sequences; which of them are verified is for the planner to say."""
        drafts: list[Draft | None] = [None] * len(sequences)
        depth, asked = self._depth(len(sequences)), len(sequences)
        if depth == 0:
            self._idle += 1
            self.num_declined += 1
            if self._idle % PROBE_EVERY:
                return drafts
            depth, asked = PROBE_TOKENS, PROBE_SEQUENCES
        started = self._clock()
        found = self._ask(sequences[:asked], [min(room, depth) for room in rooms[:asked]])
        self._note(found, self._clock() - started)
        for i, (seq, draft) in enumerate(zip(sequences[:asked], found, strict=True)):
            if draft is not None:
                drafts[i] = self._calibrated(seq, draft)
        self._look_at(drafts[:asked], depth)
        return drafts

    def _depth(self, count: int) -> int:
        """Tokens to draft for each of so many sequences, 0 when plain decoding is as fast."""
        seconds = self._times.estimate(count)
        if self._always or seconds is None or not self._cost.is_known:
            return self.max_tokens
        best, best_rate = 0, MIN_GAIN * count / self._cost.estimate(count)
        gained = rows = float(count)
        for depth in range(self.max_tokens):
            gained += count * self._chance[depth]
            rows += count * self._length[depth]
            rate = gained / (self._cost.estimate(round(rows)) + seconds * (depth + 1))
            if rate > best_rate:
                best, best_rate = depth + 1, rate
        return best

    def _note(self, found: list[Draft | None], seconds: float) -> None:
        self.num_rounds += 1
        self.draft_s += seconds
        longest = max((len(draft) for draft in found if draft is not None), default=0)
        if longest:
            self._times.observe(len(found), seconds / longest)

    def _calibrated(self, seq: Sequence, draft: Draft) -> Draft:
        kind = _kind(seq, draft)
        self._given[id(seq)] = draft.survival
        return Draft(draft.token_ids, self._confidence.survival(kind, draft.survival), kind, draft.parents, draft.distributions)

    def _look_at(self, drafts: list[Draft | None], asked_depth: int) -> None:
        """Learn how far drafts go and how sure they are, before any of them is verified."""
        present = [draft for draft in drafts if draft is not None]
        if not present:
            return
        reach = [1.0] * len(present)
        for depth in range(asked_depth):
            alive = 0
            for i, draft in enumerate(present):
                inside = depth < len(draft)
                reach[i] = reach[i] * draft.survival[depth] if inside else 0.0
                alive += inside
            self._chance[depth] += WEIGHT * (sum(reach) / len(present) - self._chance[depth])
            self._length[depth] += WEIGHT * (alive / len(present) - self._length[depth])

    def learn(self, seq: Sequence, draft: Draft, verified: Verified) -> None:
        given = self._given.get(id(seq))
        if given is not None and draft.parents is None:
            self._confidence.learn(draft.source, given, draft, verified)

    def forget(self, seq: Sequence) -> None:
        self._given.pop(id(seq), None)

    def metrics(self) -> dict[str, Any]:
        """Counters of the run, JSON-ready. declined: looks at which drafting was not worth its time."""
        return {
            "draft_rounds": self.num_rounds,
            "declined": self.num_declined,
            "draft_s": round(self.draft_s, 4),
            "draft_ms_per_token": self._times.record(),
            "confidence": self._confidence.record(),
        }


def _kind(seq: Sequence, draft: Draft) -> str:
    return draft.source if seq.request.params.is_greedy else f"{draft.source}-sampled"
