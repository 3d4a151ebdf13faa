"""How much memory the largest step takes beside weights and KV pool: what a GPU's pool must leave free."""

from __future__ import annotations

from typing import Protocol

import torch

from dspark.runtime.execution.forward_batch import build_forward_batch
from dspark.runtime.execution.model_runner import ModelRunner
from dspark.runtime.scheduling.plan import ScheduledSequence, SchedulerOutput
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams


class MemoryMeter(Protocol):
    """Watches a device's allocator."""

    def start(self) -> None:
        """Count from what is held now."""

    def peak_bytes(self) -> int:
        """The most that was held since, beyond that."""


class CudaMeter:
    """torch's allocator on the current GPU."""

    def __init__(self) -> None:
        self._held = 0

    def start(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._held = torch.cuda.memory_reserved()

    def peak_bytes(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved() - self._held


def largest_plan(config: EngineConfig, max_model_len: int) -> tuple[SchedulerOutput, int]:
    """A step with as many tokens, and as many sequences that draw one, as the limits allow, the longest query among them. And the number
    of its blocks."""
    tokens = min(config.max_num_batched_tokens, config.max_num_seqs * (max_model_len - 1))
    counts = [1] * min(config.max_num_seqs, tokens)
    left = tokens - len(counts)
    plan, num_blocks = SchedulerOutput(), 0
    for index, _ in enumerate(counts):
        more = min(left, max_model_len - 2)
        left -= more
        seq = Sequence(Request(index, [0] * (1 + more), SamplingParams()), 0, index)
        blocks = -(-seq.num_tokens // config.block_size)
        seq.table.blocks = list(range(num_blocks, num_blocks + blocks))
        num_blocks += blocks
        plan.scheduled.append(ScheduledSequence(seq, seq.num_tokens))
    return plan, num_blocks


def step_bytes(runner: ModelRunner, plan: SchedulerOutput, max_model_len: int, meter: MemoryMeter) -> int:
    """Run a plan as the largest step that there may be, and say what it took. The runner's pool holds the plan's blocks."""
    meter.start()
    batch = build_forward_batch(plan, runner.block_size, runner.device)
    batch.attention.max_context_len = max_model_len  # what kernels keep for sharing a long context; the contexts themselves are short
    logits = runner.compute(batch)
    drawn = runner.steps.prepare(plan.sampling) if runner.steps is not None else None
    if logits is not None and drawn is not None:
        drawn.draw(logits)
    return meter.peak_bytes()
