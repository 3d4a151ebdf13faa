"""A device that takes its time: work that is given to its queue is done when the device gets to it, not before, and in order.

Time passes when somebody waits, and a little whenever work is given. So what the host reads too early is not there yet, and what it
changes too early is seen by work that comes later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import Any

from fake_executor import FakeExecutor, digests, next_token

from dspark.runtime.execution.executor import FinishedStep, StepTooLargeError
from dspark.runtime.execution.forward_batch import accepted_moves
from dspark.runtime.scheduling.plan import ScheduledSequence, SchedulerOutput, StepOutput
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.draft import Verified
from dspark.runtime.speculation.verify import gained_coupled


class FakeEvent:
    """One piece of work. is_done: the device has got past it."""

    def __init__(self, queue: DeferredQueue, work: Callable[[], None], polls: int) -> None:
        self._queue, self.work, self.polls_left = queue, work, polls
        self.is_done = False

    def wait(self) -> float:
        """One millisecond for each piece of work."""
        while not self.is_done:
            self._queue.poll()
        return 1e-3


class DeferredQueue:
    """delays: polls that each piece of work takes, over and over. eager_polls: polls that pass whenever work is given, over and over."""

    def __init__(self, delays: tuple[int, ...] = (1,), eager_polls: tuple[int, ...] = (0,)) -> None:
        self._delays: Iterator[int] = cycle(delays)
        self._eager: Iterator[int] = cycle(eager_polls)
        self._waiting: deque[FakeEvent] = deque()
        self.num_given = 0
        self.most_waiting = 0

    def run(self, work: Callable[[], None]) -> FakeEvent:
        event = FakeEvent(self, work, next(self._delays))
        self._waiting.append(event)
        self.num_given += 1
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        for _ in range(next(self._eager)):
            self.poll()
        return event

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def poll(self) -> None:
        """Let the device do some of the work at the front."""
        if not self._waiting:
            return
        event = self._waiting[0]
        event.polls_left -= 1
        if event.polls_left < 0:
            event.work()
            event.is_done = True
            self._waiting.popleft()


class SentItem:
    """What the device is told of one scheduled sequence: copies, since the host goes on changing its own. paths: the draft tokens before
    each row that draws, the newest token's row first."""

    def __init__(self, item: ScheduledSequence) -> None:
        seq, draft = item.seq, item.draft
        assert not (draft and seq.num_pending), "a draft for a text that is not known"
        self.draft = draft
        self.paths = [[], *([draft.token_ids[n] for n in draft.path(node)] for node in range(len(draft)))] if draft else [[]]
        end = item.start + item.num_tokens
        self.blocks = list(seq.table.blocks)
        self.start, self.end, self.samples, self.source_row = item.start, end, item.samples, item.source_row
        self.tokens = list(seq.token_ids[:end])
        self.salt, self.draw_key, self.index = seq.cache_salt, seq.request.draw_key, seq.index
        assert len(self.tokens) == end - (item.source_row >= 0), "a token to compute is known neither to the host nor to the device"


class ArrivingStep:
    """Tokens that are not there before the device has drawn them. settle: is told what was gained."""

    def __init__(
        self,
        event: FakeEvent,
        drawn: list[int],
        sampling: list[ScheduledSequence],
        log: Callable[[], None],
        settle: Callable[[list[Verified]], None],
    ) -> None:
        self._event, self._drawn, self._sampling, self._log, self._settle = event, drawn, sampling, log, settle

    @property
    def tokens(self) -> list[int]:
        assert self._event.is_done, "a result is read before it is ready"
        return self._drawn

    def wait(self) -> StepOutput:
        seconds = self._event.wait()
        self._log()
        gained = gained_coupled(self._sampling, self.tokens)
        self._settle(gained)
        return StepOutput(gained, seconds)


class StandinExecutor(FakeExecutor):
    """The fake executor behind the engine's interface: every step is done when it is submitted."""

    device = "cpu"
    steps_ahead = False
    draft_tokens = 0
    machine = None

    def __init__(self, num_blocks: int, block_size: int, recompute_at: int | None = None) -> None:
        super().__init__(num_blocks, block_size)
        self.recompute_at = recompute_at

    def submit(self, plan: SchedulerOutput) -> Any:
        return FinishedStep(self.run(plan))

    def draws_alone(self, seq: Sequence) -> bool:
        raise AssertionError("asked of an executor that takes no steps ahead")

    def cache_salt(self, prompt_len: int) -> int:
        return prompt_len % 3 // 2  # some prompts share nothing with others

    def metrics(self) -> dict[str, Any]:
        return {}

    def shutdown(self) -> None:
        pass


class QueueExecutor(StandinExecutor):
    """The same behind a queue. log: ("submit" or "read", number of the step), as they came.

    failures: which submissions find no memory, over and over; a step of one token always fits. most_tokens: larger steps never do.
    """

    steps_ahead = True

    def __init__(
        self,
        queue: DeferredQueue,
        num_blocks: int,
        block_size: int,
        recompute_at: int | None = None,
        failures: tuple[bool, ...] = (False,),
        most_tokens: int = 1 << 20,
    ) -> None:
        super().__init__(num_blocks, block_size, recompute_at)
        self.queue = queue
        self.most_tokens = most_tokens
        self.num_failed = 0
        self._failures: Iterator[bool] = cycle(failures)
        self.drawn: list[int] = []  # by the newest step that the device has done
        self.log: list[tuple[str, int]] = []

    def draws_alone(self, seq: Sequence) -> bool:
        """Penalties count tokens, which the host does; see what `submit` asserts."""
        return not needs_history(seq)

    def submit(self, plan: SchedulerOutput) -> ArrivingStep:
        if (next(self._failures) and plan.num_tokens > 1) or plan.num_tokens > self.most_tokens:
            self.num_failed += 1
            raise StepTooLargeError(f"a step of {plan.num_tokens} tokens")
        number = sum(kind == "submit" for kind, _ in self.log)
        self.log.append(("submit", number))
        for item in plan.sampling:
            assert item.source_row < 0 or not needs_history(item.seq), "the host must draw this token, and does not know the one before"
        items, copies, drawn = [SentItem(item) for item in plan.scheduled], list(plan.copies), []
        event = self.queue.run(lambda: self._execute(items, copies, drawn))
        sampling = plan.sampling

        def settle(gained: list[Verified]) -> None:
            """The digests of accepted nodes go to their positions, behind the steps that are under way."""
            moves = accepted_moves(sampling, gained, self.block_size)
            if moves:
                self.queue.run(lambda: self._move(moves))

        return ArrivingStep(event, drawn, sampling, lambda: self.log.append(("read", number)), settle)

    def _move(self, moves: list[tuple[int, int]]) -> None:
        values = [self.slots[source] for source, _ in moves]
        for value, (_, target) in zip(values, moves, strict=True):
            self.slots[target] = value

    def _execute(self, items: list[SentItem], copies: list[tuple[int, int]], drawn: list[int]) -> None:
        """Copies, then all writes, then all reads, with the tokens that the step before drew. Raises AssertionError at a wrong read."""
        self.copy(copies)
        written: dict[int, int] = {}
        for item in items:
            if item.source_row >= 0:
                item.tokens.append(self.drawn[item.source_row])
            values = digests(item.tokens, item.salt)
            for position in range(item.start, item.end):
                self.write(written, self._place(item, position), values[position])
            for node, path in enumerate(item.paths[1:]):
                self.write(written, self._place(item, item.end + node), digests(item.tokens + path, item.salt)[-1])
        for item in items:
            for position, value in enumerate(digests(item.tokens, item.salt)):
                assert self.slots[self._place(item, position)] == value, f"position {position} of {item.end} reads what is not its own"
        self.num_computed_tokens += sum(item.end - item.start for item in items)
        for item in items:
            if item.samples:
                drawn += [next_token(item.tokens + path, item.draw_key, item.index) for path in item.paths]
        self.drawn = drawn if all(item.draft is None for item in items) else []

    def _place(self, item: SentItem, position: int) -> int:
        return item.blocks[position // self.block_size] * self.block_size + position % self.block_size


def needs_history(seq: Sequence) -> bool:
    """Whether the stand-in for a sampler draws a sequence's tokens on the host."""
    return seq.request.params.repetition_penalty != 1.0
