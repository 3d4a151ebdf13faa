"""A tiny model in a runner that records its steps, with or without a drafter beside it, and steps that decode and verify."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from device_queue import DeferredQueue
from fake_recorder import FakeRecorder

from dspark.runtime.execution.device_steps import DeviceSteps, GreedySampler
from dspark.runtime.execution.forward_batch import lay_out, put_there
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.model_runner import ModelRunner
from dspark.runtime.kv.pool import allocate_pool
from dspark.runtime.layers.rope import RotaryTables
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.plan import ScheduledSequence, SchedulerOutput
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.draft import ROOT, Draft

BLOCK, NUM_BLOCKS = 16, 40
CHAIN = Draft((9, 8, 7), (0.5,) * 3, "test")
TREE = Draft((9, 8, 7, 6), (0.5,) * 4, "test", (ROOT, ROOT, 0, 2))


def decodes(count: int, drafts: dict[int, Draft] | None = None, shift: int = 0) -> SchedulerOutput:
    """Sequences of 20 tokens and more that compute their last one, each in three blocks of its own."""
    plan = SchedulerOutput()
    for i in range(count):
        tokens = [(7 * i + 3 * j + shift) % 300 + 5 for j in range(20 + i)]
        seq = Sequence(Request(i, tokens, SamplingParams()), 0, i)
        seq.num_computed, seq.table.blocks = len(tokens) - 1, [3 * i, 3 * i + 1, 3 * i + 2]
        plan.scheduled.append(ScheduledSequence(seq, 1, (drafts or {}).get(i)))
    return plan


class Rig:
    """Reference kernels, and random contexts in the pool's blocks, of the model's layers and of the drafter's."""

    def __init__(self, engine_dir: Path, build_drafter: Callable[..., Any] | None = None) -> None:
        model, sampler = load_model(engine_dir, kernels="reference"), Sampler(frozenset())
        caches = allocate_pool(model.config, NUM_BLOCKS, BLOCK, torch.float32, "cpu")
        self.drafter = build_drafter(model, sampler, 256) if build_drafter is not None else None
        self.written = [cache for pair in caches for cache in pair]
        if self.drafter is not None:
            self.drafter.allocate(NUM_BLOCKS)
            self.written += layers_of(self.drafter)
        generator = torch.Generator().manual_seed(1)
        for cache in self.written:
            cache.normal_(generator=generator)
        self.steps = DeviceSteps(DeferredQueue(), GreedySampler(lambda seq: True), 16, "cpu")
        self.recorder = FakeRecorder()
        rope = RotaryTables(model.config, 256)
        self.runner = ModelRunner(model, caches, rope, sampler, BLOCK, "cpu", self.drafter, steps=self.steps, record=self.recorder)

    def kept(self) -> list[torch.Tensor]:
        return [cache.clone() for cache in self.written]

    def restore(self, kept: list[torch.Tensor]) -> None:
        for cache, old in zip(self.written, kept, strict=True):
            cache.copy_(old)

    def check_replays(self, plan_of: Callable[[int], SchedulerOutput], shape: tuple[int, int, int]) -> None:
        """Three steps of a shape (sequences, tokens, longest query): met, recorded and replayed, and replayed only. The replayed ones give
        the logits of steps that are computed as they come, and write what those write, nowhere else."""
        graphs, before = self.runner.graphs, self.kept()
        assert graphs is not None
        for shift in (0, 5, 11):
            plan = plan_of(shift)
            laid = lay_out(plan, BLOCK)
            self.restore(before)
            expected = self.runner.compute(put_there(laid, "cpu"))
            wanted = self.kept()
            self.restore(before)
            bucket = graphs.meet(plan, laid, self.drafter is not None)
            if shift == 0:
                assert bucket is None
                continue
            assert bucket is not None and (bucket.num_sequences, bucket.num_tokens, bucket.max_query_len) == shape
            torch.testing.assert_close(graphs.run(bucket, laid), expected, rtol=1e-4, atol=1e-4)
            for now, then, old in zip(self.kept(), wanted, before, strict=True):
                torch.testing.assert_close(now, then, rtol=1e-4, atol=1e-4)
                assert torch.equal(now == old, then == old), "another slot is written"


def layers_of(drafter: Any) -> list[torch.Tensor]:
    """What a drafter keeps in the pool's blocks: keys, values and, of EAGLE-3, features; without blocks of its own."""
    pairs = drafter._pages.caches if hasattr(drafter, "_pages") else drafter._steps.caches
    features = [drafter._features[:NUM_BLOCKS]] if hasattr(drafter, "_features") else []
    return [cache[:NUM_BLOCKS] for pair in pairs for cache in pair] + features
