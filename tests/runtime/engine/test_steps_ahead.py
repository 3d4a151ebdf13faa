"""An engine that works one step ahead of a slow device gives the answers of one that waits for every step, and reads nothing early."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from device_queue import DeferredQueue, QueueExecutor, StandinExecutor, needs_history
from fake_executor import EOS, next_token, undisturbed
from hypothesis import given, settings
from hypothesis import strategies as st
from standin_engines import answers_of, standin_engine
from standin_jobs import UNSHRUNK, arrival, check_order, delays, engines, greedy, pools, requests

from dspark.runtime.engine import Engine
from dspark.runtime.scheduling.plan import Ahead
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams


def run_ahead(queue: DeferredQueue, num_blocks: int, block_size: int, recompute_at: int | None = None, **limits: Any) -> Engine:
    return standin_engine(QueueExecutor(queue, num_blocks, block_size, recompute_at), **limits)


@given(
    limits=engines,
    pool=pools,
    specs=st.lists(requests, min_size=1, max_size=10),
    work=delays,
    eager=delays.map(lambda d: tuple(min(x, 2) for x in d)),
)
@settings(max_examples=300, derandomize=True, deadline=None, phases=UNSHRUNK)
def test_answers_are_those_of_an_engine_that_waits(limits: dict, pool: dict, specs: list[dict], work: tuple, eager: tuple) -> None:
    """Whatever arrives when, however slow the device is at each step: chunks, shared prefixes, forks, preemption, all ways to end."""
    arrivals = [arrival(i, spec) for i, spec in enumerate(specs) if spec["cut"] + 3 < limits["max_model_len"]]
    shape = (-(-pool["num_tokens"] // pool["block_size"]), pool["block_size"], pool["recompute_at"])
    most = 4 + 2 * sum(request.params.n * (len(request.prompt_token_ids) + request.params.max_tokens) for _, request in arrivals)
    waiting = answers_of(standin_engine(StandinExecutor(*shape), **limits), arrivals, most)
    engine = run_ahead(DeferredQueue(work, eager), *shape, **limits)
    assert answers_of(engine, arrivals, most) == waiting
    assert engine.metrics()["steps_ahead"] == check_order(engine.executor.log)
    for _, request in arrivals:
        if request.request_id in waiting and not request.params.stop and not needs_history(SequenceOf(request)):
            for index, (tokens, _, reason, _) in enumerate(waiting[request.request_id]):
                assert (tokens, reason) == undisturbed(request, index, limits["max_model_len"])


class SequenceOf:
    """What `needs_history` looks at."""

    def __init__(self, request: Request) -> None:
        self.request = request


def test_each_decode_is_submitted_before_the_one_before_it_is_read() -> None:
    """And the last step is known to be the last: nothing is computed for answers that have their length."""
    engine = run_ahead(DeferredQueue((3,)), 64, 4)
    answers_of(engine, [(0, greedy(i, [i, 1, 2])) for i in range(3)], 20)
    assert engine.executor.log[:5] == [("submit", 0), ("submit", 1), ("read", 0), ("submit", 2), ("read", 1)]
    assert check_order(engine.executor.log) == 11 and engine.metrics()["num_steps"] == 12
    assert engine.executor.num_computed_tokens == 3 * (3 + 11)


def test_an_answer_that_ends_costs_one_token_too_many_and_leaves_no_trace() -> None:
    """The token behind an end of text was drawn by then: it stands in no answer, and later lines do not find it in the prefix cache."""
    key = next(k for k in range(1000) if next_token([1, 2], k, 0) == EOS)
    ended = Request(0, [1, 2], SamplingParams(max_tokens=8), draw_key=key)
    engine = run_ahead(DeferredQueue((2,)), 64, 1)
    answers = answers_of(engine, [(0, ended), (0, greedy(1, [3, 3]))], 20)
    assert answers[0] == [([EOS], "", "stop", None)]
    assert engine.executor.num_computed_tokens == (2 + 1) + (2 + 11)
    again = answers_of(engine, [(0, greedy(2, [1, 2, EOS, 4]))], 20)
    assert again[2][0][0] == undisturbed(greedy(2, [1, 2, EOS, 4]), 0, 64)[0]


def test_a_penalty_makes_the_steps_wait_while_its_line_runs() -> None:
    """The host must know the newest token to draw the next one; a line that sat out every other step would go at half the pace."""
    engine = run_ahead(DeferredQueue((2,)), 64, 4)
    lines = [(0, greedy(0, [1, 2, 3], max_tokens=4, repetition_penalty=2.0)), (0, greedy(1, [2, 2, 3], max_tokens=12))]
    answers_of(engine, lines, 30)
    steps = [
        len([entry for entry in engine.executor.log[:i] if entry[0] == "submit"])
        for i, entry in enumerate(engine.executor.log)
        if entry[0] == "read"
    ]
    assert steps[:4] == [1, 2, 3, 5], "ahead only once the line with the penalty has all its tokens"
    assert engine.metrics()["num_steps"] == 12


def test_the_length_of_an_answer_is_known_before_its_last_token() -> None:
    """max_tokens 1: the whole answer is one placeholder, and there is never anything to do ahead."""
    engine = run_ahead(DeferredQueue((2,)), 64, 4)
    answers_of(engine, [(0, greedy(i, [i, 1, 2, 3, 4], max_tokens=1)) for i in range(4)], 6)
    assert check_order(engine.executor.log) == 0 and engine.executor.num_computed_tokens == 20


@pytest.mark.parametrize("num_blocks", [9, 12, 14])
def test_a_step_ahead_drives_nobody_from_their_blocks(num_blocks: int) -> None:
    """The blocks that it lacks may be those of an answer that has ended, which is known only when the results are."""
    engine = run_ahead(DeferredQueue((1,)), num_blocks, 4)
    schedule, plans = engine.scheduler.schedule, Counter[str]()

    def watched(ahead: Ahead = Ahead.NO, halved: bool = False) -> Any:
        before = engine.scheduler.num_preemptions
        plan = schedule(ahead, halved)
        if ahead is not Ahead.NO:
            assert engine.scheduler.num_preemptions == before
            plans["short"] += plan.is_short
        plans["preempted"] += engine.scheduler.num_preemptions - before
        return plan

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    answers_of(engine, [(0, greedy(i, [i, 1, 2, 3, 4, 5, 1, 1], max_tokens=20)) for i in range(4)], 200)
    assert plans["short"] and plans["preempted"]


def test_blocks_are_shared_as_if_no_step_were_ahead() -> None:
    """A block is entered in the prefix index when its tokens are known: one step later, and for an answer's last block too."""
    computed = []
    for executor in (StandinExecutor(64, 4), QueueExecutor(DeferredQueue((2,)), 64, 4)):
        engine = standin_engine(executor)
        first = answers_of(engine, [(0, greedy(0, [1, 2, 3], max_tokens=14))], 30)[0][0][0]
        answers_of(engine, [(0, greedy(1, [1, 2, 3, *first, 5], max_tokens=4))], 30)
        computed.append(executor.num_computed_tokens)
    assert computed[0] == computed[1]
