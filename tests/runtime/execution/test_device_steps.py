"""The real model behind a slow device: tokens that the host has not seen go from step to step, and the answers stay the same."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_queue import DeferredQueue
from engine_runs import run_requests, texts, tiny_engine
from host_copies import Copies
from scripted_proposer import ScriptedProposer

from dspark.kernels.reference.elementwise import rotate
from dspark.runtime.engine import Engine
from dspark.runtime.execution.device_steps import DeviceSteps, GreedySampler, best_tokens
from dspark.runtime.execution.forward_batch import build_forward_batch
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.model_runner import ModelRunner
from dspark.runtime.execution.single import SingleExecutor
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.kv.pool import allocate_pool
from dspark.runtime.layers.rope import RotaryTables
from dspark.runtime.sampling.draw import argmax_rows
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.plan import ScheduledSequence, SchedulerOutput
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import MachineError
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.halves import Halves
from dspark.runtime.speculation.speculator import Speculator


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("device-steps"))


def queued_engine(engine_dir: Path, queue: DeferredQueue, **config: Any) -> Engine:
    """An engine on a CPU that is given its work through a queue."""
    manifest = load_manifest(engine_dir)
    settings = EngineConfig(**{"device": "cpu", "kv_cache_memory_bytes": 64 << 20, **config})
    max_len = settings.max_model_len or manifest.model.context_length
    executor = SingleExecutor(engine_dir, manifest, settings, max_len, False, False, queue=queue)
    return Engine(manifest, settings, executor, load_codec(engine_dir), max_len)


def lines(**options: Any) -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in (21, 9, 40, 1)]
    prompts[1] = prompts[0][:17] + prompts[1]
    return [Request(i, prompt, SamplingParams(max_tokens=20, **options), draw_key=70 + i) for i, prompt in enumerate(prompts)]


def run(engine: Engine, requests: Iterable[Request]) -> dict[int, list[list[int]]]:
    for request in requests:
        engine.add(request)
    outputs = {output.request_id: output for output in engine.drain()}
    engine.kv.check_integrity([])
    return texts(outputs)


@pytest.mark.parametrize(
    ("options", "config", "ahead"),
    [
        ({}, {}, True),
        ({"ignore_eos": True, "n": 2}, {"max_num_batched_tokens": 16, "max_num_seqs": 3}, True),
        ({"ignore_eos": True}, {"kv_cache_memory_bytes": 48 << 10, "max_model_len": 64}, True),
        ({"repetition_penalty": 1.3}, {}, False),
        ({"temperature": 0.9, "top_p": 0.95}, {}, False),
        ({"ignore_eos": True}, {"speculative": "ngram"}, True),
    ],
)
def test_answers_do_not_depend_on_when_they_are_known(engine_dir: Path, options: dict, config: dict, ahead: bool) -> None:
    """Chunked prompts, siblings and a tight pool, a step ahead, also where a speculator rests; and what the host must draw, in steps
    that wait."""
    expected = texts(run_requests(engine_dir, lines(**options), **config))
    queue = DeferredQueue((3, 0, 1), (0, 2, 1))
    engine = queued_engine(engine_dir, queue, **config)
    assert run(engine, lines(**options)) == expected
    assert (engine.metrics()["steps_ahead"] > 0) is ahead
    assert queue.most_waiting == (2 if ahead else 1)
    assert queue.num_given == engine.metrics()["num_steps"], "every step is given to the device as one piece of work"
    assert engine.metrics()["forward_s"] == pytest.approx(1e-3 * queue.num_given)


@pytest.mark.parametrize("kind", ["near", "siblings", "random-tree"])
@pytest.mark.parametrize(("options", "config"), [({}, {}), ({"repetition_penalty": 1.1}, {}), ({}, {"speculative_sampling": "rejection"})])
def test_halves_are_drafted_and_verified_in_turn(engine_dir: Path, kind: str, options: dict, config: dict) -> None:
    """Chains, and trees whose accepted nodes move behind the other half's step; rows that the host must draw; the other rule."""
    asked = [*lines(ignore_eos=True), *lines(ignore_eos=True, **options)]
    asked = [Request(i, [*r.prompt_token_ids, 5 + i], r.params, r.draw_key) for i, r in enumerate(asked)]
    expected = texts(run_requests(engine_dir, asked))
    queue = DeferredQueue((3, 0, 1), (0, 2, 1))
    engine = queued_engine(engine_dir, queue, speculative="ngram", **config)
    answers = {(i, 0): tokens[0] for i, tokens in expected.items()}
    engine.speculator = engine.scheduler.speculator = Speculator([ScriptedProposer(kind, answers, 320, 4)], fixed=4)
    engine.halves = Always()
    assert run(engine, asked) == expected
    metrics = engine.metrics()["speculation"]
    assert metrics["halves"]["steps"] > 10 and metrics["accepted_tokens"] > 40
    if not config and not options:
        assert queue.most_waiting == (2 if kind == "near" else 4), "two steps, and what moves behind either"


class Always(Halves):
    """Divides whenever it can be done."""

    def pay(self, num_sequences: int) -> bool:
        return num_sequences > 1


def test_lines_that_the_host_must_draw_join_lines_that_run_ahead(engine_dir: Path) -> None:
    """A step may be planned ahead and turn out to have a row for the host: it is waited for at once, with the fed tokens in place."""
    plain, penalized = lines(ignore_eos=True), lines(ignore_eos=True, repetition_penalty=1.2)
    late = [Request(10 + r.request_id, [*r.prompt_token_ids, 5], r.params, r.draw_key) for r in penalized]
    engine = queued_engine(engine_dir, DeferredQueue((2,)))
    for request in plain:
        engine.add(request)
    outputs = [*engine.step(), *engine.step(), *engine.step()]
    ahead = engine.metrics()["steps_ahead"]
    for request in late:
        engine.add(request)
    outputs += list(engine.drain())
    assert ahead == 3 and engine.metrics()["steps_ahead"] >= ahead + 1
    assert texts({o.request_id: o for o in outputs}) == texts(run_requests(engine_dir, [*plain, *late]))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_step_is_one_copy_and_asks_the_device_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """A question waits for all that the device has still to do, and one in a layer is asked as often as there are layers. Tensors of the
    meta device have no answers: they raise. Caches are left to the kernels, which are tested for it on their own."""
    model = load_model(tiny_engine(tmp_path, family), device="meta", kernels="reference")
    monkeypatch.setattr(model.kernels, "paged_attention", lambda q, *rest: q.flatten(1))
    monkeypatch.setattr(model.kernels, "rope_store_kv", _rotated_only)
    caches = allocate_pool(model.config, 8, 16, torch.float32, "meta")
    steps = DeviceSteps(DeferredQueue(), GreedySampler(lambda seq: True), 4, "meta")
    runner = ModelRunner(model, caches, RotaryTables(model.config, 256, "meta"), Sampler(frozenset()), 16, "meta", steps=steps)
    plan = SchedulerOutput(copies=[(5, 6)])
    for row, (num_tokens, pending) in enumerate([(9, 0), (1, 1), (1, 0)]):
        seq = Sequence(Request(row, list(range(5, 5 + num_tokens - pending)) or [5], SamplingParams()), 0, row)
        seq.table.blocks, seq.num_pending, seq.pending_row = [row], pending, 2
        seq.num_computed = seq.num_tokens - num_tokens
        plan.scheduled.append(ScheduledSequence(seq, num_tokens))
    drawn = steps.prepare(plan.sampling)
    assert drawn is not None and plan.scheduled[1].source_row == 2
    with Copies() as copies:
        logits = runner.compute(build_forward_batch(plan, 16, "meta"))
        assert logits is not None
        tokens = drawn.draw(logits)
    assert tokens.shape == (3,) and tokens.device.type == "meta"
    assert len(copies.sizes) == 1
    with pytest.raises(RuntimeError, match="meta"):
        tokens[0].item()


def _rotated_only(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The queries, as `rope_store_kv` gives them, nothing stored."""
    num_heads, head_dim = rest[6], rest[3].shape[-1]
    return rotate(qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim)), cos, sin)


def test_the_best_token_is_the_hosts() -> None:
    """Ties go to the lowest id, a NaN or a row without a finite best has none."""
    rows = torch.randn(40, 301).bfloat16().float()
    rows[0, 7] = rows[0, 200] = 50.0
    rows[1, 3] = torch.nan
    rows[2] = -torch.inf
    rows[3, 5] = torch.inf
    rows[4] = 0.0
    rows[5, :-1] = -torch.inf
    for dtype in (torch.float32, torch.bfloat16):
        wanted = argmax_rows(rows.numpy())
        assert best_tokens(rows.to(dtype)).tolist() == wanted.tolist()
    assert wanted[:6].tolist() == [7, -1, -1, -1, 0, 300]


def test_a_row_without_a_token_ends_the_job_where_it_is_read() -> None:
    """The next step is under way by then, and must not look up token -1."""
    queue = DeferredQueue((1,))
    steps = DeviceSteps(queue, GreedySampler(lambda seq: True), 4, "cpu")
    seq = Sequence(Request(3, [5, 6], SamplingParams()), 0, 0)
    item = ScheduledSequence(seq, 2)
    drawn = steps.prepare([item])
    assert drawn is not None
    pending = steps.start(lambda: torch.full((1, 9), torch.nan), drawn, lambda gained: None)
    seq.num_pending = 2
    with pytest.raises(MachineError, match=r"no finite logits for request 3 at token 2 \(answer 0\)"):
        pending.wait()
    assert steps._drawn.tolist() == [0, 0, 0, 0]
