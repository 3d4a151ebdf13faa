"""Steps whose tokens are drawn on the device, fed to the next step there, and read by the host when they have arrived.

The host never waits in here but in `DrawnStep.wait` and where tokens must be drawn by the host (`run`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dspark.runtime.execution.device_queue import DeviceQueue, Event
from dspark.runtime.execution.forward_batch import ForwardBatch
from dspark.runtime.sampling.sampler import RowContext, no_finite_logits
from dspark.runtime.scheduling.plan import ScheduledSequence, StepOutput
from dspark.runtime.speculation.draft import Verified
from dspark.runtime.speculation.verify import gained_coupled, rows_of

Draw = Callable[[torch.Tensor], torch.Tensor]
"""logits [rows, V] -> a token for each row, int64 [rows], -1 where none has a finite logit; on the logits' device, without waiting."""


class DeviceSampler(Protocol):
    """Draws tokens where the logits are."""

    def draws_alone(self, seq: RowContext) -> bool:
        """Whether a row's token can be drawn without its newest token's being known to the host."""

    def prepare(self, rows: Sequence[RowContext], positions: Sequence[int]) -> Draw | None:
        """What draws these rows, or None when the host must. positions: of the tokens to draw. The rows' options are read now: they change
        before it is called."""


class DeviceSteps:
    """Starts steps on a queue. device_s: seconds that the device had steps to work on, as far as they were waited for.

    Tokens drawn by a step lie in a buffer of the device until the next step's are drawn; that one takes them from there. The queue's order
    keeps both apart. Of a step with drafts nobody takes a token there: which of them counts is known when all have arrived.
    """

    def __init__(self, queue: DeviceQueue, sampler: DeviceSampler, max_rows: int, device: str) -> None:
        self.sampler = sampler
        self.device_s = 0.0
        self._queue = queue
        self._then: Event | None = None
        self._drawn = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._pin = device.startswith("cuda")

    def prepare(self, sampling: list[ScheduledSequence]) -> DrawnRows | None:
        """What draws the step's tokens on the device, None when the host must. A step that draws none draws alone."""
        rows = [row for item in sampling for row in rows_of(item)]
        positions = [position for item in sampling for position in _positions(item)]
        draw = self.sampler.prepare(rows, positions)
        return None if draw is None else DrawnRows(draw, sampling, list(zip(rows, positions, strict=True)))

    def fed(self, batch: ForwardBatch) -> torch.Tensor:
        """The batch's tokens int64 [T], those that the step before drew in their places (part of a step's work)."""
        rows = batch.source_rows
        return batch.token_ids if rows is None else torch.where(rows >= 0, self._drawn[rows.clamp(min=0)], batch.token_ids)

    def start(self, compute: Callable[[], torch.Tensor | None], drawn: DrawnRows, settle: Callable[[list[Verified]], None]) -> DrawnStep:
        """Queue a step: its logits, its tokens, and their copy to the host. settle: is told what was gained when it has been waited for."""
        rows = len(drawn.rows)
        arrived = torch.empty(rows, dtype=torch.int64, pin_memory=self._pin)

        @torch.inference_mode()
        def work() -> None:
            logits = compute()
            if logits is None:
                return
            tokens = drawn.draw(logits)
            arrived.copy_(tokens, non_blocking=True)
            if rows == len(drawn.sampling):
                self._drawn[:rows] = tokens.clamp(min=0)  # -1 ends the job when the host sees it; till then it must be a token

        event = self._queue.run(work)
        return DrawnStep(arrived, drawn, lambda: self.waited(event), settle)

    def then(self, work: Callable[[], None]) -> None:
        """Queue work between two steps."""
        self._then = self._queue.run(work)

    def beside(self) -> AbstractContextManager[Any]:
        """See `DeviceQueue.beside`. What `then` was given is waited for."""
        if self._then is not None:
            self.waited(self._then)
            self._then = None
        return self._queue.beside()

    def waited(self, event: Event) -> float | None:
        """Wait for an event, and count the device's time."""
        seconds = event.wait()
        self.device_s += seconds or 0.0
        return seconds

    def run(self, compute: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        """Compute a step's logits behind what is queued, and wait for them."""
        found: list[torch.Tensor | None] = []

        @torch.inference_mode()
        def work() -> None:
            found.append(compute())

        self.waited(self._queue.run(work))
        return found[0]


@dataclass(frozen=True)
class DrawnRows:
    """What draws a step's rows: a token for each, and whose they are, with their positions: those of `rows_of`, sequence after sequence."""

    draw: Draw
    sampling: list[ScheduledSequence]
    rows: list[tuple[RowContext, int]]


class DrawnStep:
    """See `executor.PendingStep`. arrived int64 [rows]: host memory that the device has written when `wait` returns, which gives the
    device's seconds. settle: is told what was gained, before anybody else."""

    def __init__(
        self, arrived: torch.Tensor, drawn: DrawnRows, wait: Callable[[], float | None], settle: Callable[[list[Verified]], None]
    ) -> None:
        self._arrived, self._drawn, self._wait, self._settle = arrived, drawn, wait, settle

    def wait(self) -> StepOutput:
        seconds = self._wait()
        tokens = self._arrived.tolist()
        for token, (seq, position) in zip(tokens, self._drawn.rows, strict=True):
            if token < 0:
                raise no_finite_logits(seq, position)
        gained = gained_coupled(self._drawn.sampling, tokens)
        self._settle(gained)
        return StepOutput(gained, seconds)


def _positions(item: ScheduledSequence) -> list[int]:
    """Where the tokens that an item's rows draw will stand."""
    first = item.start + item.num_tokens
    return [first, *(first + item.draft.depth(node) for node in range(len(item.draft)))] if item.draft else [first]


class GreedySampler:
    """Draws the best token of rows that want it and whose logits no option changes; all other rows are the host's."""

    def __init__(self, takes_the_best: Callable[[RowContext], bool]) -> None:
        self._takes_the_best = takes_the_best

    def draws_alone(self, seq: RowContext) -> bool:
        return self._takes_the_best(seq)

    def prepare(self, rows: Sequence[RowContext], positions: Sequence[int]) -> Draw | None:
        return best_tokens if all(self._takes_the_best(seq) for seq in rows) else None


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """logits [rows, V] -> int64 [rows]: the largest, the lowest id among equals; -1 where it is not finite or a NaN is in the row.

    As `sampling.draw.argmax_rows`. torch.argmax promises no order among equals.
    """
    top = logits.amax(-1, keepdim=True)  # NaN if there is one
    ids = torch.arange(logits.shape[-1], device=logits.device)
    first = torch.where(logits == top, ids, logits.shape[-1]).amin(-1)
    return torch.where(top[:, 0].isfinite(), first, -1)
