"""Measures tiles and keeps what is faster: a few neighbours of the untuned tile for each shape, then of the best of them.

A candidate wins when its result is right, and when it is faster than the untuned tile by more than noise, twice. What cannot be compiled or
does not fit is declined with its reason; whatever goes wrong, the untuned tile stands. Nothing here knows a GPU: a `Clock` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dspark.kernels.triton.tuning import choices
from dspark.kernels.triton.tuning.book import TileBook
from dspark.kernels.triton.tuning.choices import Choice, Tuned
from dspark.kernels.triton.tuning.clock import Clock

LEAST_GAIN = 0.03
"""Share of the untuned time that a tile must save: less is noise."""
MOST_ROUNDS = 2
SAVE_EVERY_S = 10.0
TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.float16: (4e-3, 2e-3), torch.bfloat16: (3e-2, 1e-2)}
"""(relative, absolute) difference to the untuned tile's result, the latter where results have a mean square of 1: the same numbers, added
up in another order."""


@dataclass(frozen=True)
class Bench:
    """What is measured of a subject. run: (choice, turn) -> result, on the inputs of that turn; sets, num_bytes: see `Clock.seconds`."""

    run: Callable[[Any, int], torch.Tensor]
    sets: int
    num_bytes: int


@dataclass(frozen=True)
class Subject:
    """A key to find a tile for. untuned: what stands without tuning. candidates: what is worth trying around a choice. prepare: makes the
    inputs. exact: whether another tile gives the same bits."""

    key: str
    untuned: Choice
    candidates: Callable[[Any], Sequence[Choice]]
    prepare: Callable[[], Bench]
    exact: bool = False


@dataclass
class TuneReport:
    """What a run of the tuner came to. finished: keys measured now, with their entries; known: keys measured before; left: keys that there
    was no time for; failed: key -> why it could not be measured. stopped: why the whole of it ended early, or None."""

    finished: dict[str, Tuned] = field(default_factory=dict)
    known: int = 0
    left: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    stopped: str | None = None
    cache_problem: str | None = None

    @property
    def num_faster(self) -> int:
        return sum(entry.seconds < entry.untuned_seconds for entry in self.finished.values())

    def metrics(self) -> dict[str, Any]:
        """Counts and reasons, JSON-ready."""
        return {
            "seconds": round(self.seconds, 3),
            "measured": len(self.finished),
            "faster": self.num_faster,
            "known": self.known,
            "left": self.left,
            "declined": sum(len(entry.declined) for entry in self.finished.values()),
            "failed": dict(self.failed),
            "stopped": self.stopped,
            "cache_problem": self.cache_problem,
        }


class _OutOfTime(Exception):
    """The budget is used up in the middle of a subject, which is dropped."""


def tune(
    subjects: Sequence[Subject],
    book: TileBook,
    clock: Clock,
    budget_s: float,
    save: Callable[[dict[str, Tuned]], str | None],
    again: bool = False,
) -> TuneReport:
    """Measure subjects in their order until the time is up; `book` takes what is found, `save` keeps it (None, or why it could not).

    again: also those that the book has measurements of. Raises nothing but what stops a program, and keeps what is finished then.
    """
    report, started = TuneReport(), clock.now()
    pending = [subject for subject in subjects if again or subject.key not in book.tuned]
    report.known = len(subjects) - len(pending)
    unsaved: dict[str, Tuned] = {}
    saved_at = started
    try:
        for number, subject in enumerate(pending):
            try:
                entry = tune_one(subject, clock, started + budget_s)
            except _OutOfTime:
                report.left = len(pending) - number
                break
            except Exception as error:
                report.failed[subject.key] = reason_of(error)
                if (lost := _lost(clock)) is not None:
                    report.stopped, report.left = lost, len(pending) - number - 1
                    break
                continue
            unsaved[subject.key] = report.finished[subject.key] = entry
            if clock.now() - saved_at >= SAVE_EVERY_S:
                report.cache_problem, unsaved, saved_at = save(unsaved), {}, clock.now()
    finally:
        if unsaved:
            report.cache_problem = save(unsaved)
        book.learn(report.finished)
    report.seconds = clock.now() - started
    return report


def tune_one(subject: Subject, clock: Clock, deadline: float) -> Tuned:
    """The entry of one key. Raises what the untuned tile raises."""
    if clock.now() >= deadline:
        raise _OutOfTime
    bench, declined = subject.prepare(), dict[str, str]()
    seconds = _Timings(bench, clock, deadline)
    want = bench.run(subject.untuned, 0).clone()
    untuned_s = seconds.of(subject.untuned)
    found: dict[Choice, float] = {subject.untuned: untuned_s}
    best = subject.untuned
    for _ in range(MOST_ROUNDS):
        around = best
        for choice in subject.candidates(around):
            if choice in found or choices.text(choice) in declined:
                continue
            try:
                wrong = _why_wrong(bench.run(choice, 0), want, subject.exact)
                if wrong is None:
                    found[choice] = seconds.of(choice)
            except _OutOfTime:
                raise
            except Exception as error:  # what does not compile or fit; a lost device fails the untuned tile below
                wrong = reason_of(error)
            if wrong is not None:
                declined[choices.text(choice)] = wrong
        best = min(found, key=lambda choice: found[choice])
        if best == around:
            break
    if best != subject.untuned:
        untuned_s, best_s = seconds.of(subject.untuned), seconds.of(best)  # once more, side by side: the least of many is lucky
        if max(found[best], best_s) > (1 - LEAST_GAIN) * min(found[subject.untuned], untuned_s):
            best, best_s = subject.untuned, untuned_s
    else:
        best_s = untuned_s
    clock.check()
    return Tuned(best, best_s, untuned_s, len(found) - 1, declined)


class _Timings:
    """Measures while there is time."""

    def __init__(self, bench: Bench, clock: Clock, deadline: float) -> None:
        self._bench, self._clock, self._deadline = bench, clock, deadline

    def of(self, choice: Choice) -> float:
        """Seconds of a run."""
        if self._clock.now() >= self._deadline:
            raise _OutOfTime
        bench = self._bench
        return self._clock.seconds(lambda turn: bench.run(choice, turn), bench.sets, bench.num_bytes)


def _why_wrong(result: torch.Tensor, want: torch.Tensor, exact: bool) -> str | None:
    """Why a result is not that of the untuned tile, or None."""
    if exact:
        return None if torch.equal(result, want) else "gives other bits"
    relative, absolute = TOLERANCES[want.dtype]
    got, right = result.float(), want.float()
    size = right.square().mean().sqrt()
    off = (got - right).abs() - relative * right.abs() - absolute * size
    worst = float(off.max()) if off.numel() else 0.0
    return None if worst <= 0 else f"gives other results: off by {worst:.3g} more than rounding explains"


def reason_of(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def _lost(clock: Clock) -> str | None:
    """Why the device is lost, or None."""
    try:
        clock.check()
    except Exception as error:
        return f"the device is lost: {reason_of(error)}"
    return None
