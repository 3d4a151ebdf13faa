"""What a step will do (ints, made by the scheduler) and what it gave (ints, made by the executor)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.draft import Draft, Verified


class Ahead(Enum):
    """Whom a step may take that is planned while the one before it runs. ALL: everybody, by placeholders for what is not drawn yet.
    OTHERS: those who wait for no token, because the next step of the others depends on the text."""

    NO = "no"
    ALL = "all"
    OTHERS = "others"


@dataclass(slots=True)
class ScheduledSequence:
    """`num_tokens` tokens of a sequence, from position `start` on. samples: its last one is among them, so a new one is drawn.

    draft: tokens that may follow, computed in the same step to be verified.
    source_row: where the one token to compute is not drawn yet, its row among the `sampling` of the step before; else -1.
    What is not given is the sequence's state when it is scheduled: a step that is planned ahead changes it before this one ends.
    """

    seq: Sequence
    num_tokens: int
    draft: Draft | None = None
    start: int = field(init=False)
    samples: bool = field(init=False)
    source_row: int = field(init=False)

    def __post_init__(self) -> None:
        seq, start = self.seq, self.seq.num_computed
        end, num_known = start + self.num_tokens, len(seq.token_ids)
        self.start, self.samples = start, end == num_known + seq.num_pending
        self.source_row = seq.pending_row if end > num_known else -1
        assert self.source_row < 0 or self.num_tokens == 1, "only the newest token may be one that is still to be drawn"

    @property
    def num_query_tokens(self) -> int:
        """Tokens that the model computes: the sequence's own and the draft's."""
        return self.num_tokens + (len(self.draft) if self.draft else 0)


@dataclass
class SchedulerOutput:
    """One step. copies: KV blocks (source, target) to copy before anything is written.

    num_resident: so many at the front of `scheduled` ran before this step, the others are admitted in it. is_short: planned ahead, and
    somebody is left out for want of blocks; the results of the steps before may bring some.
    """

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_resident: int = 0
    is_short: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(item.num_query_tokens for item in self.scheduled)

    @property
    def sampling(self) -> list[ScheduledSequence]:
        """The sequences that draw a token, in row order."""
        return [item for item in self.scheduled if item.samples]


@dataclass
class StepOutput:
    """What each sampling sequence gained, in the order of SchedulerOutput.sampling: one token, more where a draft was accepted.

    device_s: seconds that the step took on a device that works beside the host and keeps time.
    """

    gained: list[Verified]
    device_s: float | None = None
