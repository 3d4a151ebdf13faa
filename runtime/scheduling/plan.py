"""What a step will do (ints, made by the scheduler) and what it gave (ints, made by the executor)."""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.draft import Draft, Verified


@dataclass
class ScheduledSequence:
    """`num_tokens` tokens of a sequence, from position seq.num_computed on. samples: its last one is among them, so a new one is drawn.

    draft: tokens that may follow, computed in the same step to be verified.
    """

    seq: Sequence
    num_tokens: int
    draft: Draft | None = None

    @property
    def samples(self) -> bool:
        return self.seq.num_computed + self.num_tokens == self.seq.num_tokens

    @property
    def num_query_tokens(self) -> int:
        """Tokens that the model computes: the sequence's own and the draft's."""
        return self.num_tokens + (len(self.draft) if self.draft else 0)


@dataclass
class SchedulerOutput:
    """One step. copies: KV blocks (source, target) to copy before anything is written."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_query_tokens for item in self.scheduled)

    @property
    def sampling(self) -> list[ScheduledSequence]:
        """The sequences that draw a token, in row order."""
        return [item for item in self.scheduled if item.samples]


@dataclass
class StepOutput:
    """What each sampling sequence gained, in the order of SchedulerOutput.sampling: one token, more where a draft was accepted."""

    gained: list[Verified]
