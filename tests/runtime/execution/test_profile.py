"""The step that a GPU's pool leaves room for is the largest that a run can have, and it is run, not guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import tiny_engine

from dspark.runtime.execution.device_steps import DeviceSteps, GreedySampler
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.memory import kv_pool_bytes
from dspark.runtime.execution.model_runner import ModelRunner
from dspark.runtime.execution.profile import largest_plan, step_bytes
from dspark.runtime.kv.pool import allocate_pool
from dspark.runtime.layers.rope import RotaryTables
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.spec.engine_config import EngineConfig


@pytest.mark.parametrize(
    ("seqs", "tokens", "max_model_len", "longest"),
    [(64, 512, 4096, 449), (4, 512, 100, 99), (8, 512, 17, 16), (1, 16, 4096, 16), (16, 16, 64, 1)],
)
def test_the_largest_step_has_all_tokens_and_all_rows(seqs: int, tokens: int, max_model_len: int, longest: int) -> None:
    """As many of both as the limits allow, and one query as long as may be."""
    plan, num_blocks = largest_plan(EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens), max_model_len)
    assert plan.num_tokens == min(tokens, seqs * (max_model_len - 1)) and len(plan.sampling) == len(plan.scheduled) == seqs
    assert max(item.num_tokens for item in plan.scheduled) == longest < max_model_len
    blocks = [block for item in plan.scheduled for block in item.seq.table.blocks]
    assert sorted(blocks) == list(range(num_blocks))


class Watch:
    """A meter that says what it was told, when."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self) -> None:
        self.events.append("start")

    def peak_bytes(self) -> int:
        self.events.append("peak")
        return 77


class AtOnce:
    """A queue that is never used: the profile computes directly."""

    def run(self, work: Any) -> Any:
        raise AssertionError


def test_the_profile_runs_the_model_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = load_model(tiny_engine(tmp_path)), EngineConfig(max_num_seqs=4, max_num_batched_tokens=40)
    plan, num_blocks = largest_plan(config, 32)
    caches = allocate_pool(model.config, num_blocks, 16, torch.float32, "cpu")
    meter, rope = Watch(), RotaryTables(model.config, 32)

    def best(logits: torch.Tensor) -> torch.Tensor:
        meter.events.append(f"draw {list(logits.shape)}")
        return logits.argmax(-1)

    monkeypatch.setattr("dspark.runtime.execution.device_steps.best_tokens", best)
    steps = DeviceSteps(AtOnce(), GreedySampler(lambda seq: True), 4, "cpu")
    runner = ModelRunner(model, caches, rope, Sampler(frozenset()), 16, "cpu", steps=steps)
    assert step_bytes(runner, plan, 32, meter) == 77
    assert meter.events == ["start", f"draw [4, {model.config.vocab_size}]", "peak"]


def test_the_pool_of_a_gpu_is_what_weights_and_the_largest_step_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """90 % of 100 bytes, of which 30 hold weights, less the 25 of a step."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70, 100))
    config = EngineConfig(gpu_memory_utilization=0.9)
    assert kv_pool_bytes(config, "cuda", 1, 4096, step_bytes=25) in (34, 35)
    assert kv_pool_bytes(config, "cuda", 1, 4096, step_bytes=90) == 0
