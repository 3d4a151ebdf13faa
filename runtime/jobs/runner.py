"""The loop of a job: feed the engine, take what it finished, write it down; until nothing is left or something says stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from dspark.runtime.jobs.engine_protocol import EngineProtocol
from dspark.runtime.jobs.journal import LineKey
from dspark.runtime.jobs.lines import JobLine, LineError
from dspark.runtime.jobs.metrics import RunMetrics
from dspark.runtime.jobs.order import Work
from dspark.runtime.jobs.responses import failure_record, success_record
from dspark.runtime.jobs.store import ResultStore
from dspark.runtime.spec.errors import RequestError
from dspark.runtime.spec.request import Request

QUEUE_FACTOR = 4
"""Requests kept in the engine, as a multiple of its batch: enough to choose from, few enough to keep the rest on disk."""

QUEUE_BYTES = 64 << 20
"""Bytes of input lines kept in the engine at most (one line is always let in)."""

BUILDS_PER_STEP = 256
"""Lines tokenized between two steps at most, so that a long row of bad lines does not hold up the flushing."""

MEMORY_SAMPLE_S = 0.5


class Builder(Protocol):
    """Turns parsed lines into requests (`prompts.PromptBuilder`)."""

    def build(self, line: JobLine, request_id: int) -> Request:
        """Raises LineError."""


class Reporter(Protocol):
    """Told of the progress of a job."""

    def finished(self, count: int, metrics: RunMetrics) -> None:
        """`count` more lines have a result."""

    def failed(self, error: LineError) -> None:
        """A line got an error record."""


@dataclass(frozen=True)
class Answering:
    """What stands in answers besides the text. created: the engine's build time, seconds since 1970."""

    created: int
    model_name: str


class Runner:
    """Runs the lines of a feed through an engine into a store. `stop` is asked between steps and returns a reason or None."""

    def __init__(
        self,
        engine: EngineProtocol,
        builder: Builder,
        store: ResultStore,
        answering: Answering,
        metrics: RunMetrics,
        reporter: Reporter,
        stop: Callable[[], str | None],
        max_errors: int | None = None,
    ) -> None:
        self._engine = engine
        self._builder = builder
        self._store = store
        self._answering = answering
        self._metrics = metrics
        self._reporter = reporter
        self._stop = stop
        self._max_errors = max_errors
        self._running: dict[int, Work] = {}
        self._running_bytes = 0
        self._num_failed = 0
        self._num_new = 0

    def run(self, feed: Iterator[Work]) -> str | None:
        """Work until the feed is empty (None) or there is a reason to stop (returned). Everything finished is durable then.

        Raises what the engine or the disk raises; what was finished before is written as far as the disk takes it.
        """
        reason: str | None = None
        sampled_at = 0.0
        exhausted = False
        try:
            while reason is None:
                exhausted = exhausted or self._fill(feed)
                for output in self._engine.step() if self._running else ():
                    work = self._running.pop(output.request_id)
                    self._running_bytes -= work.num_bytes
                    assert work.line is not None
                    self._metrics.observe(output)
                    record = success_record(work.line, output, self._answering.created, self._answering.model_name)
                    self._take(work.key, True, record)
                self._flush()
                now = time.monotonic()
                if now - sampled_at >= MEMORY_SAMPLE_S:
                    self._metrics.sample_memory()
                    sampled_at = now
                if exhausted and not self._running:
                    break
                reason = self._stop() or self._too_many_errors()
        finally:
            self._store.sync()
        return reason

    def _fill(self, feed: Iterator[Work]) -> bool:
        """Top the engine up; returns whether the feed is empty."""
        target = QUEUE_FACTOR * self._engine.max_num_seqs
        for _ in range(BUILDS_PER_STEP):
            if len(self._running) >= target or (self._running and self._running_bytes >= QUEUE_BYTES) or self._too_many_errors():
                return False
            work = next(feed, None)
            if work is None:
                return True
            self._admit(work)
        return False

    def _admit(self, work: Work) -> None:
        """Hand a line to the engine, or write its error record."""
        if work.line is None:
            assert work.error is not None
            self._fail(work.key, work.error)
            return
        try:
            self._engine.add(self._builder.build(work.line, work.key.at))
        except RequestError as error:
            self._fail(work.key, LineError.at(work.line, error))
            return
        self._running[work.key.at] = work
        self._running_bytes += work.num_bytes

    def _fail(self, key: LineKey, error: LineError) -> None:
        self._num_failed += 1
        self._take(key, False, failure_record(error))
        self._reporter.failed(error)

    def _take(self, key: LineKey, ok: bool, record: bytes) -> None:
        self._store.add(key, ok, record)
        self._num_new += 1

    def _flush(self) -> None:
        self._store.flush()
        if self._num_new:
            self._reporter.finished(self._num_new, self._metrics)
            self._num_new = 0

    def _too_many_errors(self) -> str | None:
        if self._max_errors is not None and self._num_failed >= self._max_errors:
            return f"--max-errors {self._max_errors} reached"
        return None
