"""Half of the batch is drafted while the other half is verified: the answers are those of an engine that waits, nothing is read early."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from device_queue import DeferredQueue, QueueExecutor, StandinExecutor
from fake_executor import FakeSpeculator
from hypothesis import given, settings
from hypothesis import strategies as st
from standin_engines import answers_of, standin_engine
from standin_jobs import UNSHRUNK, arrival, check_order, delays, engines, greedy, pools, requests

from dspark.runtime.engine import Engine
from dspark.runtime.scheduling.plan import Ahead


class Decided:
    """Halves by decision, over and over."""

    def __init__(self, *pays: bool) -> None:
        self.pays, self.num_asked, self.num_steps = pays, 0, 0

    def pay(self, num_sequences: int) -> bool:
        self.num_asked += 1
        return self.pays[self.num_asked % len(self.pays)] and num_sequences > 1

    def ran(self, plan: Any, device_s: float | None) -> None:
        assert device_s is not None and device_s > 0

    def prepared(self, plan: Any, host_s: float) -> None:
        assert plan.scheduled and host_s >= 0

    def metrics(self) -> dict[str, Any]:
        return {"steps": self.num_steps}


class NotingSpeculator(FakeSpeculator):
    """Notes whether a step was under way when it was asked for drafts."""

    engine: Engine
    asked_beside = 0

    def timed(self, plan: Any, seconds: float) -> None:
        assert seconds >= 0

    def metrics(self) -> dict[str, Any]:
        return {}

    def propose(self, sequences: Any, rooms: Any, num_planned: int, num_rows: int) -> Any:
        self.asked_beside += any(seq.num_pending for seq in self.engine.scheduler.running)
        return super().propose(sequences, rooms, num_planned, num_rows)


def drafting_engine(executor: Any, speculator: NotingSpeculator, decided: Decided, **limits: Any) -> Engine:
    engine = standin_engine(executor, **limits)
    speculator.engine = engine
    engine.speculator = engine.scheduler.speculator = speculator  # type: ignore[assignment]
    engine.halves = decided if executor.steps_ahead else None  # type: ignore[assignment]
    return engine


@given(
    limits=engines,
    pool=pools,
    specs=st.lists(requests, min_size=1, max_size=10),
    work=delays,
    eager=delays.map(lambda d: tuple(min(x, 2) for x in d)),
    pays=st.lists(st.booleans(), min_size=1, max_size=9).map(lambda flags: (True, *flags)),
    resting=st.sampled_from([(), (), (3,), (1, 2, 3, 4, 5, 6, 7), tuple(range(8))]),
    failures=st.sampled_from([(False,)] * 3 + [(False, False, True, False)]),
)
@settings(max_examples=300, derandomize=True, deadline=None, phases=UNSHRUNK)
def test_answers_are_those_of_an_engine_that_waits(
    limits: dict, pool: dict, specs: list[dict], work: tuple, eager: tuple, pays: tuple, resting: tuple, failures: tuple
) -> None:
    """Chains and trees, right and wrong; halves that begin, end and become uneven at any step; steps without drafts, for which everybody
    may be taken; steps that find no memory; chunks, shared prefixes, forks, preemption, all ways to end."""
    arrivals = [arrival(i, spec) for i, spec in enumerate(specs) if spec["cut"] + 3 < limits["max_model_len"]]
    shape = (-(-pool["num_tokens"] // pool["block_size"]), pool["block_size"], pool["recompute_at"])
    most = 4 + 2 * sum(request.params.n * (len(request.prompt_token_ids) + request.params.max_tokens) for _, request in arrivals)
    waiting = answers_of(standin_engine(StandinExecutor(*shape), **limits), arrivals, most)
    executor, speculator = QueueExecutor(DeferredQueue(work, eager), *shape, failures=failures), NotingSpeculator(4, resting)
    engine = drafting_engine(executor, speculator, Decided(*pays), **limits)
    assert answers_of(engine, arrivals, 100 + 20 * most) == waiting
    assert engine.metrics()["steps_ahead"] == check_order(engine.executor.log) >= engine.halves.num_steps
    assert not speculator.held


def test_each_half_is_drafted_while_the_other_is_verified() -> None:
    """From the second step on always; in each step there is half of the batch, and nobody waits longer than one."""
    executor, speculator = QueueExecutor(DeferredQueue((3,)), 256, 4), NotingSpeculator(3)
    engine = drafting_engine(executor, speculator, Decided(True))
    submit, members = executor.submit, []

    def watched(plan: Any) -> Any:
        members.append({item.seq.request.request_id for item in plan.scheduled})
        return submit(plan)

    executor.submit = watched  # type: ignore[method-assign]
    answers_of(engine, [(0, greedy(i, [i % 7, 1, 2, i // 7], max_tokens=30)) for i in range(8)], 200)
    assert executor.log[:7] == [
        *[("submit", 0), ("read", 0)],  # the prompts
        *[("submit", 1), ("submit", 2), ("read", 1), ("submit", 3), ("read", 2)],
    ]
    steady = members[3:15]
    assert {len(step) for step in steady} == {4} and all(not one & other for one, other in pairwise(steady))
    assert speculator.asked_beside > 20 and engine.halves.num_steps > 20


def test_halves_that_became_uneven_are_joined_and_divided_anew() -> None:
    """Of eight lines in two fours three of one four end: one and four would be two steps for little more than one step's work."""
    executor, speculator = QueueExecutor(DeferredQueue((1,)), 256, 4), NotingSpeculator(2)
    engine = drafting_engine(executor, speculator, Decided(True))
    schedule, steps = engine.scheduler.schedule, []

    def watched(ahead: Ahead = Ahead.NO, halved: bool = False) -> Any:
        plan = schedule(ahead, halved)
        steps.append((ahead, len(plan.scheduled)))
        return plan

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    lengths = [6, 6, 6, 40, 40, 40, 40, 40]
    answers_of(engine, [(0, greedy(i, [i % 7, 1, 2, i // 7], max_tokens=n)) for i, n in enumerate(lengths)], 200)
    assert steps[:3] == [(Ahead.NO, 8), (Ahead.NO, 4), (Ahead.OTHERS, 4)]
    ended = steps.index((Ahead.NO, 3))
    assert ended > 3 and set(steps[3:ended]) <= {(Ahead.OTHERS, n) for n in (1, 2, 3, 4)}
    assert set(steps[ended + 1 : ended + 13]) == {(Ahead.OTHERS, 2), (Ahead.OTHERS, 3)}


@pytest.mark.parametrize("resting", [(), tuple(range(8))])
def test_steps_without_drafts_are_taken_ahead_as_in_plain_decoding(resting: tuple) -> None:
    """Where nothing pays, speculation must not cost the overlap of host and device."""
    executor, speculator = QueueExecutor(DeferredQueue((2,)), 256, 4), NotingSpeculator(3, resting)
    engine = drafting_engine(executor, speculator, Decided(False))
    answers_of(engine, [(0, greedy(i, [i, 1, 2])) for i in range(3)], 40)
    ahead = check_order(executor.log)
    assert ahead == (11 if resting else 0) and engine.halves.num_steps == 0


def test_a_step_behind_drafts_takes_nobody_whose_text_is_unknown() -> None:
    """Even when the speculator rests from then on: how many tokens the drafts bring decides where the next one goes."""
    executor, speculator = QueueExecutor(DeferredQueue((2,)), 256, 4), NotingSpeculator(3, resting=(1, 2, 3, 4, 5, 6, 7))
    engine = drafting_engine(executor, speculator, Decided(False))
    ahead_of, seen = engine.scheduler.ahead_of, []

    def watched(plan: Any, *rest: Any) -> Ahead:
        found = ahead_of(plan, *rest)
        seen.append((any(item.draft for item in plan.scheduled), found))
        return found

    engine.scheduler.ahead_of = watched  # type: ignore[method-assign]
    answers_of(engine, [(0, greedy(i, [i, 1, 2, 4], max_tokens=40)) for i in range(3)], 200)
    assert (True, Ahead.NO) in seen and (False, Ahead.ALL) in seen and (True, Ahead.ALL) not in seen
