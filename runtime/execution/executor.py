"""Where a plan runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from dspark.runtime.scheduling.plan import SchedulerOutput, StepOutput
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.draft import Draft
from dspark.runtime.speculation.pairing import Machine


class PendingStep(Protocol):
    """A step under way. Its tokens are to be had from `wait` alone, so that nobody can read them before they are there."""

    def wait(self) -> StepOutput:
        """Block until the step is done. Raises MachineError when a token cannot be drawn."""


@dataclass(frozen=True)
class FinishedStep:
    """A step that is done already: what an executor returns that computes as it is told."""

    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output


class StepTooLargeError(Exception):
    """The device has no memory for a step. Nothing of it counts; a smaller one may be submitted."""


class Executor(Protocol):
    """One or many ranks behind one call."""

    num_blocks: int
    """KV blocks in the pool."""

    device: str
    """"cpu" or "cuda"."""

    @property
    def steps_ahead(self) -> bool:
        """Whether a step may be submitted while the one before it runs. It takes what that one draws from the device (`source_row`)."""

    def submit(self, plan: SchedulerOutput) -> PendingStep:
        """Start one step, behind those that were submitted before. All that it needs of the plan and its sequences is read here.

        Raises StepTooLargeError.
        """

    def draws_alone(self, seq: Sequence) -> bool:
        """Whether a sequence's next token can be drawn while its newest one is known to the device only."""

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
