"""What a step will do (ints, made by the scheduler) and what it gave (ints, made by the executor)."""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark.runtime.scheduling.sequence import Sequence


@dataclass
class ScheduledSequence:
    """`num_tokens` tokens of a sequence, from position seq.num_computed on. samples: its last one is among them, so a new one is drawn."""

    seq: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.seq.num_computed + self.num_tokens == self.seq.num_tokens


@dataclass
class SchedulerOutput:
    """One step. copies: KV blocks (source, target) to copy before anything is written."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)

    @property
    def sampling(self) -> list[ScheduledSequence]:
        """The sequences that draw a token, in row order."""
        return [item for item in self.scheduled if item.samples]


@dataclass
class StepOutput:
    """One new token per sampling sequence, in the order of SchedulerOutput.sampling; top2_gaps: largest minus second largest
    logit of each row, when recorded."""

    token_ids: list[int]
    top2_gaps: list[float] | None = None
