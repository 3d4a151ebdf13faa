"""Asks proposers for drafts, cuts them to what pays at the present load, and learns from what came of them.

Nothing here can change a text (see `verify`), so it is free to be wrong: a wrong estimate costs time only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from dspark.runtime.scheduling.plan import SchedulerOutput
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.acceptance import Acceptance
from dspark.runtime.speculation.cost import StepCost
from dspark.runtime.speculation.draft import Draft, Verified
from dspark.runtime.speculation.drafter import Proposer
from dspark.runtime.speculation.drafter_proposer import DrafterProposer
from dspark.runtime.speculation.planner import best_counts, schedule_early_stop
from dspark.runtime.speculation.timeline import Timeline

PATIENCE = 3
"""Drafts in a row of which nothing was accepted before a line pauses."""
LONGEST_PAUSE = 64
IDLE_AFTER, IDLE_STRIDE = 16, 8
"""When nothing has paid for so many steps, drafts are looked for in every so many steps only."""
PROBE_EVERY = 32
"""Of the looks at which nothing pays, one in so many verifies a short draft all the same: the job may have changed."""
PROBE_TOKENS = 2
PLAIN_EVERY = 24
"""One step in so many goes without drafts, so that the price of plain decoding stays known."""


@dataclass
class _Line:
    """What a sequence's drafts came to lately. pause: steps that it still sits out."""

    misses: int = 0
    pause: int = 0


class Speculator:
    """proposers: asked in this order, each for the sequences that the ones before have nothing for, or promise less for than a drafter.

    fixed: verify so many tokens of every draft; None chooses by cost and acceptance. cost, acceptance: known from an earlier run.
    """

    def __init__(
        self,
        proposers: Rows[Proposer],
        fixed: int | None = None,
        cost: StepCost | None = None,
        acceptance: dict[str, Any] | None = None,
    ) -> None:
        self.proposers = list(proposers)
        self.fixed = fixed
        longest = max(proposer.max_tokens for proposer in self.proposers)
        self.max_tokens = longest if fixed is None else min(longest, fixed)
        self.cost = cost if cost is not None else StepCost()
        self.acceptance = Acceptance(acceptance)
        self._lines: dict[int, _Line] = {}
        self._owners: dict[str, Proposer] = {}
        self._steps = self._idle = self._looks_without = 0
        self._outdone = 0
        self.num_rounds = self.num_drafted = self.num_accepted = 0
        self.num_rows = self.num_verify_steps = 0
        self.verify_s = 0.0
        self._lengths: dict[int, int] = {}
        self._timeline = Timeline()

    def propose(self, sequences: list[Sequence], rooms: list[int], num_planned: int, num_rows: int) -> list[Draft | None]:
        """See `scheduler.Speculates`."""
        drafts: list[Draft | None] = [None] * len(sequences)
        rests = self.rests
        self._steps += 1
        if rests:
            return drafts
        asked = [i for i, seq in enumerate(sequences) if self._may_draft(seq)]
        for place, proposer in enumerate(self.proposers):
            open_ = [i for i in asked if drafts[i] is None]
            if not open_:
                break
            promised = self._promise(place + 1, len(open_))
            for i, draft in zip(open_, proposer.propose([sequences[i] for i in open_], [rooms[i] for i in open_]), strict=True):
                if draft is not None:
                    draft = self._with_survival(draft)
                    if not promised or self._is_kept(draft, promised):
                        drafts[i] = draft
                        self._owners[draft.source] = proposer
        return self._cut(drafts, num_planned, num_rows)

    @property
    def rests(self) -> bool:
        """See `scheduler.Speculates`: nothing has paid for long, or the price of plain decoding is due to be looked at."""
        coming = self._steps + 1
        skipped = self._idle >= IDLE_AFTER and coming % IDLE_STRIDE > 0
        return self.fixed is None and (skipped or coming % PLAIN_EVERY == 1)

    def rest(self) -> None:
        """See `scheduler.Speculates`."""
        self._steps += 1

    def _promise(self, first: int, count: int) -> float:
        """Tokens that the drafters from place `first` on are expected to bring a sequence, of so many."""
        return max((p.promise(count) for p in self.proposers[first:] if isinstance(p, DrafterProposer)), default=0.0)

    def _is_kept(self, draft: Draft, promised: float) -> bool:
        """Whether a draft stands although a drafter promises so many tokens: because it brings as many, or to be tried all the same, so
        that what such drafts are worth stays known."""
        if sum(chances(draft)) >= promised:
            return True
        self._outdone += 1
        return self._outdone % PROBE_EVERY == 0

    def _with_survival(self, draft: Draft) -> Draft:
        """The draft with learned estimates where its proposer has none of its own."""
        if draft.survival:
            return draft
        rates = self.acceptance.survival(draft.source, draft.longest())
        rates_by_node = rates if draft.parents is None else [rates[draft.depth(node) - 1] for node in range(len(draft))]
        return Draft(draft.token_ids, tuple(rates_by_node), draft.source, draft.parents, draft.distributions)

    def _cut(self, drafts: list[Draft | None], num_planned: int, num_rows: int) -> list[Draft | None]:
        if self.fixed is not None:
            return [draft.cut(self.fixed) if draft is not None else None for draft in drafts]
        present = [i for i, draft in enumerate(drafts) if draft is not None]
        if not present:
            self._idle += 1
            return drafts
        survivals = [chances(draft) for draft in drafts if draft is not None]
        if not self.cost.is_known:
            return self._first(drafts, present)
        are_random = any(draft.distributions is not None for draft in drafts if draft is not None)
        choose = schedule_early_stop if are_random else best_counts
        counts = choose(survivals, num_planned, self.cost.estimate, num_rows, most_tokens=self.cost.reach(num_planned))
        if not any(counts):
            self._idle += 1
            self._looks_without += 1
            if self._looks_without % PROBE_EVERY == 0:
                counts[self._looks_without // PROBE_EVERY % len(present)] = PROBE_TOKENS
        else:
            self._idle = 0
        cut: list[Draft | None] = [None] * len(drafts)
        for i, count in zip(present, counts, strict=True):
            draft = drafts[i]
            if count and draft is not None:
                cut[i] = draft.cut(count)
        return cut

    def _first(self, drafts: list[Draft | None], present: list[int]) -> list[Draft | None]:
        """One short draft: the step that verifies it is the second point that an estimate needs."""
        tried = next(i for i in present)
        found = drafts[tried]
        return [found.cut(PROBE_TOKENS) if i == tried and found is not None else None for i in range(len(drafts))]

    def _may_draft(self, seq: Sequence) -> bool:
        line = self._lines.get(id(seq))
        if line is None or line.pause == 0:
            return True
        line.pause -= 1
        return False

    def learn(self, seq: Sequence, draft: Draft, verified: Verified) -> None:
        """See `scheduler.Speculates`."""
        self.acceptance.learn(draft, verified)
        self.num_rounds += 1
        self.num_drafted += len(draft)
        self.num_accepted += verified.num_accepted
        self._timeline.kept(verified.num_accepted)
        self._lengths[len(draft)] = self._lengths.get(len(draft), 0) + 1
        seq.num_drafted += len(draft)
        seq.num_accepted += verified.num_accepted
        line = self._lines.setdefault(id(seq), _Line())
        line.misses = 0 if verified.num_accepted else line.misses + 1
        if line.misses >= PATIENCE and self.fixed is None:
            line.pause = min(2 ** (line.misses - PATIENCE), LONGEST_PAUSE)
        owner = self._owners.get(draft.source)
        if owner is not None:
            owner.learn(seq, draft, verified)

    def forget(self, seq: Sequence) -> None:
        """See `scheduler.Speculates`."""
        self._lines.pop(id(seq), None)
        for proposer in self.proposers:
            proposer.forget(seq)

    def timed(self, plan: SchedulerOutput, seconds: float) -> None:
        """Take in what a step cost, if it only decodes and verifies: one that fills the cache takes few of its tokens through the head."""
        sequences = len(plan.sampling)
        drafted = sum(len(item.draft or ()) for item in plan.sampling)
        self.num_rows += sequences
        self._timeline.add(sequences, drafted)
        if drafted:
            self.num_verify_steps += 1
            self.verify_s += seconds
        rows = sequences + drafted
        if rows == plan.num_tokens:
            self.cost.observe(_bucket(rows), seconds)

    def metrics(self) -> dict[str, Any]:
        """Counters of the run, JSON-ready."""
        return {
            "proposers": [proposer.name for proposer in self.proposers],
            "rounds": self.num_rounds,
            "draft_tokens": self.num_drafted,
            "accepted_tokens": self.num_accepted,
            "acceptance_rate": round(self.num_accepted / self.num_drafted, 4) if self.num_drafted else None,
            "mean_accepted_length": round(1 + self.num_accepted / self.num_rounds, 4) if self.num_rounds else None,
            "verified_lengths": {str(length): count for length, count in sorted(self._lengths.items())},
            "acceptance": self.acceptance.record(),
            "tokens_per_step": round(1 + self.num_accepted / self.num_rows, 4) if self.num_rows else None,
            "verify_steps": self.num_verify_steps,
            "verify_s": round(self.verify_s, 4),
            "step_cost_ms": self.cost.record(),
            "over_time": self._timeline.record(),
            **{
                key: value
                for proposer in self.proposers
                if isinstance(proposer, DrafterProposer)
                for key, value in proposer.metrics().items()
            },
        }


def chances(draft: Draft) -> list[float]:
    """For each node the probability that it is accepted with all before it on its path."""
    if draft.parents is None:
        return list(accumulate(draft.survival, mul))
    found: list[float] = []
    for node, own in enumerate(draft.survival):
        parent = draft.parent(node)
        found.append(own if parent < 0 else own * found[parent])
    return found


def _bucket(tokens: int) -> int:
    """A step's tokens rounded to a few sizes, eight to a doubling."""
    return tokens if tokens <= 16 else round(2 ** (round(8 * math.log2(tokens)) / 8))
