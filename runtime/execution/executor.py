"""Where a plan runs."""

from __future__ import annotations

from typing import Any, Protocol

from dspark.runtime.scheduling.plan import SchedulerOutput, StepOutput
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.draft import Draft
from dspark.runtime.speculation.pairing import Machine


class Executor(Protocol):
    """One or many ranks behind one call."""

    num_blocks: int
    """KV blocks in the pool."""

    device: str
    """"cpu" or "cuda"."""

    def execute(self, plan: SchedulerOutput) -> StepOutput:
        """Run one step to its end."""

    @property
    def draft_tokens(self) -> int:
        """The longest draft of its drafter, 0 without one."""

    def draft(self, sequences: list[Sequence], rooms: list[int]) -> list[Draft | None]:
        """Drafts of its drafter, see `speculation.drafter.Drafter.draft`."""

    def use_drafter(self, used: bool) -> None:
        """Whether the drafter it was made with takes part; without it a step costs what plain decoding does."""

    @property
    def machine(self) -> Machine:
        """What its step times hold for."""

    def cache_salt(self, prompt_len: int) -> int:
        """What a sequence's keys depend on besides its tokens (see kv.PrefixIndex.root)."""

    @property
    def recompute_at(self) -> int | None:
        """Length at which a sequence's keys must all be computed anew (longrope), or None."""

    def metrics(self) -> dict[str, Any]:
        """Counters and choices, JSON-ready."""

    def reset_counters(self) -> None:
        """Start counting anew."""

    def shutdown(self) -> None:
        """Give memory and threads back."""
