"""Steps that are replayed in rounded shapes give the logits, keys, values and answers of steps that are computed as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_queue import DeferredQueue
from engine_runs import run_requests, texts, tiny_engine
from fake_recorder import FakeRecorder
from step_rig import BLOCK, CHAIN, TREE, Rig, decodes

from dspark.runtime.engine import Engine
from dspark.runtime.execution.forward_batch import lay_out, put_there
from dspark.runtime.execution.graphs import StepGraphs, bucket_of, padded, rounded, why_not
from dspark.runtime.execution.single import SingleExecutor
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.scheduling.plan import ScheduledSequence, SchedulerOutput
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.draft import Draft


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("graphs"))


@pytest.mark.parametrize(
    ("count", "drafts", "shape"),
    [
        (1, {}, (1, 1, 1)),
        (3, {}, (4, 4, 1)),
        (8, {}, (8, 8, 1)),
        (9, {}, (16, 16, 1)),
        (3, {1: CHAIN}, (4, 8, 4)),
        (3, {0: TREE, 2: CHAIN}, (4, 16, 8)),
    ],
)
@torch.inference_mode()
def test_a_rounded_step_gives_what_the_step_gives(engine_dir: Path, count: int, drafts: dict[int, Draft], shape: tuple) -> None:
    """The same logits but for rounding (a matrix of other height is summed in other order), and nothing else stored: added tokens stood in
    a slot of somebody's and overwrote a key."""
    rig = Rig(engine_dir)
    graphs = rig.runner.graphs
    assert graphs is not None
    rig.check_replays(lambda shift: decodes(count, drafts, shift), shape)
    assert graphs.metrics() == {"off": None, "recorded": 1, "steps_replayed": 2, "steps_eager": 1}
    assert rig.recorder.num_replayed == 2


@torch.inference_mode()
def test_tokens_that_the_device_has_drawn_are_taken_by_row(engine_dir: Path) -> None:
    """Also by a recording: which rows is told each time."""
    rig = Rig(engine_dir)
    graphs = rig.runner.graphs
    assert graphs is not None
    for rows in ([2, 0, 1], [1, 2, 0], [0, 1, 2]):
        known, before = decodes(3), rig.kept()
        expected = rig.runner.compute(put_there(lay_out(known, BLOCK), "cpu"))
        drawn = torch.zeros(16, dtype=torch.int64)
        fed = SchedulerOutput()
        for item, row in zip(known.scheduled, rows, strict=True):
            drawn[row] = item.seq.token_ids.pop()
            item.seq.num_pending, item.seq.pending_row = 1, row
            fed.scheduled.append(ScheduledSequence(item.seq, 1))
        rig.steps._drawn.copy_(drawn)
        rig.restore(before)
        laid = lay_out(fed, BLOCK)
        assert not laid.arrays["token_ids"].any()
        bucket = graphs.meet(fed, laid)
        if bucket is not None:
            torch.testing.assert_close(graphs.run(bucket, laid), expected, rtol=1e-4, atol=1e-4)
    assert graphs.recordings.num_replayed == 2


def test_prompts_are_computed_as_they_come(engine_dir: Path) -> None:
    """Their shapes are many, and their kernels long enough; so are steps whose rope asks for the length."""
    graphs = StepGraphs(lambda batch: None, FakeRecorder(), BLOCK, "cpu", longest_plain=22)
    prompt = decodes(2)
    prompt.scheduled[0].num_tokens = 2
    assert [graphs.meet(prompt, lay_out(prompt, BLOCK)) for _ in range(3)] == [None] * 3
    longer = decodes(4)
    assert [graphs.meet(longer, lay_out(longer, BLOCK)) for _ in range(3)] == [None] * 3
    short = decodes(3)
    assert graphs.meet(short, lay_out(short, BLOCK)) is None and graphs.meet(short, lay_out(short, BLOCK)) is not None


def test_rounding_wastes_little() -> None:
    sizes = sorted({rounded(count) for count in range(1, 4097)})
    assert sizes[:8] == [1, 2, 4, 8, 16, 24, 32, 40]
    assert all(count <= rounded(count) < 2 * count for count in range(1, 4097))
    assert all(rounded(count) <= 1.25 * count for count in range(32, 4097))
    assert len([size for size in sizes if size <= 512]) < 30


def test_padding_adds_sequences_without_tokens_and_tokens_without_a_sequence() -> None:
    laid = lay_out(decodes(3, {0: TREE}), BLOCK)
    bucket = bucket_of(laid)
    arrays = padded(bucket, laid, BLOCK)
    assert arrays["query_start"].tolist() == [0, 5, 6, 7, 7]
    assert arrays["context_lens"].tolist()[3:] == [0] and arrays["slot_mapping"].tolist()[7:] == [-1]
    assert arrays["block_tables"].shape == (4, bucket.max_context_len // BLOCK)
    for name, array in laid.arrays.items():
        if name != "block_tables":
            assert np.array_equal(arrays[name][: array.shape[0]], array), name


def run(engine_dir: Path, record: Any, requests: list[Request], **config: Any) -> tuple[dict[int, list[list[int]]], dict[str, Any]]:
    manifest = load_manifest(engine_dir)
    settings = EngineConfig(**{"device": "cpu", "kernels": "reference", "kv_cache_memory_bytes": 64 << 20, **config})
    max_len = settings.max_model_len or manifest.model.context_length
    executor = SingleExecutor(engine_dir, manifest, settings, max_len, False, False, queue=DeferredQueue((2, 0), (0, 1)), record=record)
    engine = Engine(manifest, settings, executor, load_codec(engine_dir), max_len)
    for request in requests:
        engine.add(request)
    outputs = texts({output.request_id: output for output in engine.drain()})
    engine.kv.check_integrity([])
    return outputs, engine.metrics()


def lines(**options: Any) -> list[Request]:
    params = SamplingParams(**{"max_tokens": 16, "ignore_eos": True, **options})
    return [Request(i, [5 + i, 6, 7, 8] * (i + 2), params, draw_key=i) for i in range(5)]


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, {}),
        ({"n": 2}, {"kv_cache_memory_bytes": 96 << 10, "max_model_len": 64}),
        ({"temperature": 0.8}, {}),
        ({}, {"speculative": "ngram", "num_speculative_tokens": 4}),
        ({}, {"speculative": "ngram", "num_speculative_tokens": 6, "speculative_tree": True}),
    ],
)
def test_answers_are_those_of_steps_that_are_computed(engine_dir: Path, options: dict[str, Any], config: dict[str, Any]) -> None:
    """Ahead and waiting, decoding and verifying, with copies and a pool that preempts."""
    expected = texts(run_requests(engine_dir, lines(**options), kernels="reference", **config))
    found, metrics = run(engine_dir, FakeRecorder(), lines(**options), **config)
    assert found == expected
    assert metrics["cuda_graphs"]["steps_replayed"] > 5 and metrics["cuda_graphs"]["recorded"] > 0


def test_a_recording_that_cannot_be_made_ends_recording_and_says_why(engine_dir: Path) -> None:
    """The job goes on; what is recorded already would be right, but a device that refused once is not asked again."""
    expected = texts(run_requests(engine_dir, lines(), kernels="reference"))
    found, metrics = run(engine_dir, FakeRecorder(fails_at=0), lines())
    assert found == expected
    graphs = metrics["cuda_graphs"]
    assert graphs["off"] == "operation not permitted when stream is capturing" and graphs["steps_replayed"] == 0


def test_no_memory_for_a_recording_is_no_memory_for_the_step() -> None:
    def full(work: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    plan = decodes(2)
    laid = lay_out(plan, BLOCK)
    graphs = StepGraphs(lambda batch: torch.zeros(2, 3), full, BLOCK, "cpu")
    assert graphs.meet(plan, laid) is None
    bucket = graphs.meet(plan, laid)
    assert bucket is not None
    with pytest.raises(torch.OutOfMemoryError):
        graphs.run(bucket, laid)
    assert graphs.recordings.failed is None


TRITON = {"rope_store_kv": "triton", "paged_attention": "triton", "moe_mlp": "reference"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("auto", "cuda", TRITON, False), None),
        (("off", "cuda", TRITON, False), "--cuda-graphs is off"),
        (("auto", "cpu", TRITON, False), "needs a GPU, the device is cpu"),
        (("auto", "cuda", TRITON, True), "moe_mlp is the reference one, which waits for the host"),
        (("auto", "cuda", {**TRITON, "paged_attention": "reference"}, False), "paged_attention is the reference one"),
    ],
)
def test_the_reason_is_named_where_nothing_is_recorded(arguments: tuple, reason: str | None) -> None:
    found = why_not(*arguments)
    assert found is None if reason is None else found is not None and found.startswith(reason)
