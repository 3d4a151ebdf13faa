"""A step that the device has no memory for makes the steps smaller; the job goes on and its answers stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from device_queue import DeferredQueue, QueueExecutor, StandinExecutor
from engine_runs import run_requests, texts, tiny_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from standin_engines import answers_of, standin_engine
from standin_jobs import UNSHRUNK, arrival, check_order, delays, engines, greedy, pools, requests

from dspark.runtime.engine import Engine
from dspark.runtime.execution.model_runner import ModelRunner
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import MachineError


@given(
    limits=engines,
    pool=pools,
    specs=st.lists(requests, min_size=1, max_size=8),
    work=delays,
    failures=st.lists(st.booleans(), min_size=2, max_size=9).map(lambda flags: (*flags, False)),
)
@settings(max_examples=200, derandomize=True, deadline=None, phases=UNSHRUNK)
def test_answers_survive_failures_at_any_step(limits: dict, pool: dict, specs: list[dict], work: tuple, failures: tuple) -> None:
    """While a step is under way too: chunks, newcomers, forks and copies are taken back; no unwritten block stays in the prefix index."""
    arrivals = [arrival(i, spec) for i, spec in enumerate(specs) if spec["cut"] + 3 < limits["max_model_len"]]
    shape = (-(-pool["num_tokens"] // pool["block_size"]), pool["block_size"], pool["recompute_at"])
    total = sum(request.params.n * (len(request.prompt_token_ids) + request.params.max_tokens) for _, request in arrivals)
    expected = answers_of(standin_engine(StandinExecutor(*shape), **limits), arrivals, 4 + 2 * total)
    executor = QueueExecutor(DeferredQueue(work), *shape, failures=failures)
    engine = standin_engine(executor, **limits)
    assert answers_of(engine, arrivals, 100 + 40 * total) == expected
    check_order(executor.log)
    assert engine.metrics()["steps_too_large"] == executor.num_failed


def test_the_budget_is_halved_until_steps_fit() -> None:
    """And stays there: what was too much once will be again."""
    executor = QueueExecutor(DeferredQueue((1,)), 200, 4, most_tokens=9)
    engine = standin_engine(executor, max_num_batched_tokens=32, max_num_seqs=8)
    answers = answers_of(engine, [(0, greedy(i, [i % 6, 1, 2, 3, 4, 5, i % 5, i % 3])) for i in range(8)], 400)
    assert len(answers) == 8 and executor.num_failed == 2
    assert engine.metrics()["max_num_batched_tokens"] == 8


def test_sequences_that_decode_keep_their_blocks() -> None:
    """A newcomer's prompt is what was too large; who decodes goes on where it was."""
    executor = QueueExecutor(DeferredQueue((0,)), 200, 16, failures=(False,) * 6 + (True,) + (False,) * 90)
    engine = standin_engine(executor, max_num_batched_tokens=32)
    first = [(0, greedy(i, [i, 1, 2], max_tokens=12)) for i in range(3)]
    answers_of(engine, [*first, (4, greedy(9, [4] * 20, max_tokens=3))], 60)
    assert executor.num_failed == 1 and engine.metrics()["preemptions"] <= 1
    assert executor.num_computed_tokens == 3 * (3 + 11) + 20 + 2


def test_what_is_computed_again_is_shared_again() -> None:
    """A sequence stayed in place though its block had left the prefix index: nobody found its tokens from there on."""
    computed = []
    for failures in ((False,), (False, False, True) + (False,) * 90):
        executor = QueueExecutor(DeferredQueue((0,)), 200, 4, failures=failures)
        engine = standin_engine(executor, max_num_batched_tokens=16)
        answers_of(engine, [(0, greedy(0, [1, 2, 3, 4] * 12, max_tokens=4))], 40)
        before = executor.num_computed_tokens
        answers_of(engine, [(0, greedy(1, [1, 2, 3, 4] * 12 + [5], max_tokens=4))], 40)
        computed.append((executor.num_failed, executor.num_computed_tokens - before))
    assert computed == [(0, 1 + 3), (1, 1 + 3)]


def test_no_memory_for_one_token_ends_the_job() -> None:
    executor = QueueExecutor(DeferredQueue((1,)), 64, 4, most_tokens=0)
    engine = standin_engine(executor)
    engine.add(greedy(0, [1, 2, 3, 4]))
    with pytest.raises(MachineError, match="no memory for a step of one token"):
        for _ in range(10):
            engine.step()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
@pytest.mark.parametrize("config", [{}, {"speculative": "ngram"}])
def test_the_real_executor_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, config: dict[str, Any]) -> None:
    """Whichever way the allocator puts it, in the middle of a step; any other error is an error."""
    engine_dir = tiny_engine(tmp_path)
    lines = [greedy(i, [5, 6, 7, i, 5, 6, 7, i] * 4, max_tokens=8) for i in range(4)]
    expected = texts(run_requests(engine_dir, lines, **config))
    compute, calls = ModelRunner.compute, [0]

    def failing(self: ModelRunner, batch: Any) -> Any:
        logits = compute(self, batch)
        calls[0] += 1
        if calls[0] in (1, 2, 7):
            raise error
        return logits

    monkeypatch.setattr(ModelRunner, "compute", failing)
    settings = EngineConfig(device="cpu", kv_cache_memory_bytes=64 << 20, **config)
    engine = Engine.from_directory(engine_dir, settings, load_codec(engine_dir))
    for line in lines:
        engine.add(line)
    assert texts({output.request_id: output for output in engine.drain()}) == expected
    assert engine.metrics()["steps_too_large"] == 3
    monkeypatch.setattr(ModelRunner, "compute", lambda self, batch: torch.zeros(2) @ torch.zeros(3))
    engine.add(lines[0])
    with pytest.raises(RuntimeError, match="tensor size"):
        engine.step()
