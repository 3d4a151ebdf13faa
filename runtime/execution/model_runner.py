"""What runs on one rank: a plan goes in, new tokens come out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from dspark.kernels.staging import stage
from dspark.runtime.execution.device_steps import DeviceSteps
from dspark.runtime.execution.executor import FinishedStep, PendingStep
from dspark.runtime.execution.forward_batch import ForwardBatch, Laid, accepted_moves, copy_groups, lay_out, put_there
from dspark.runtime.execution.graphs import Bucket, Record, StepGraphs
from dspark.runtime.layers.rope import RotaryTables
from dspark.runtime.models.decoder import Decoder, KVCaches
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.plan import ScheduledSequence, SchedulerOutput, StepOutput
from dspark.runtime.speculation.draft import Verified
from dspark.runtime.speculation.drafter import Drafter
from dspark.runtime.speculation.verify import Verify, verify_coupled


class ModelRunner:
    """Model, KV pool and sampler of one device, and the drafter that reads the model's features if there is one.

    verify: which of a draft's tokens are kept. steps: where a step's work goes, None for a device that does it at once. record: how steps
    are recorded to be replayed, None to compute all of them (see `graphs`); it needs `steps`.
    forward_s: seconds spent in the model (not in building inputs or sampling); with `steps`, those in which the host started it and waited
    for its logits, while `steps.device_s` has the device's.
    absorb_s: in the drafter after each step that was not replayed.
    """

    def __init__(
        self,
        model: Decoder,
        caches: KVCaches,
        rope: RotaryTables,
        sampler: Sampler,
        block_size: int,
        device: str,
        drafter: Drafter | None = None,
        verify: Verify = verify_coupled,
        steps: DeviceSteps | None = None,
        record: Record | None = None,
    ) -> None:
        self.model = model
        self.caches = caches
        self.rope = rope
        self.sampler = sampler
        self.block_size = block_size
        self.device = device
        self.drafter = drafter
        self.verify = verify
        self.steps = steps
        self.graphs: StepGraphs | None = None
        if record is not None:
            assert steps is not None
            self.graphs = StepGraphs(self._computed, record, block_size, device, rope.longest_plain)
        self.forward_s = 0.0
        self.absorb_s = 0.0
        self.sampling_s = 0.0

    def submit(self, plan: SchedulerOutput) -> PendingStep:
        """Start a step. Where its tokens are drawn on the host it is over when this returns."""
        laid, sampling = lay_out(plan, self.block_size), plan.sampling
        if self.steps is None:
            return FinishedStep(self._draw(self.compute(put_there(laid, self.device)), sampling))
        work = self._work(plan, laid)
        waits = self.verify is not verify_coupled and any(item.draft for item in sampling)  # the other rule decides where its draws are
        drawn = self.steps.prepare(sampling) if not waits else None
        started = time.perf_counter()
        if drawn is not None:
            pending = self.steps.start(work, drawn, lambda gained: self._settle(sampling, gained))
            self.forward_s += time.perf_counter() - started
            return pending
        logits = self.steps.run(work)
        self.forward_s += time.perf_counter() - started
        return FinishedStep(self._draw(logits, sampling))

    def _work(self, plan: SchedulerOutput, laid: Laid) -> Callable[[], torch.Tensor | None]:
        """What computes a step's logits, by a recording if there is one for it."""
        bucket = self.graphs.meet(plan, laid, self.drafter is not None) if self.graphs is not None else None
        if bucket is not None:
            return lambda: self._replayed(bucket, laid)
        batch = put_there(laid, self.device)
        return lambda: self.compute(batch)

    def _replayed(self, bucket: Bucket, laid: Laid) -> torch.Tensor:
        assert self.graphs is not None
        if laid.copies:
            self._copy_blocks(copy_groups(laid.copies, *stage([np.asarray(laid.copies, np.int64)], self.device)))
        if self.drafter is not None:
            self.drafter.count_step(laid.copies)
        return self.graphs.run(bucket, laid)

    @torch.inference_mode()
    def compute(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Copy blocks and run the model over the batch: logits [rows, V], None when no token is drawn. Reads nothing of the plan."""
        self._copy_blocks(batch.copies)
        if self.drafter is not None:
            self.drafter.count_step(batch.pairs)
        return self._computed(batch)

    def _computed(self, batch: ForwardBatch) -> torch.Tensor | None:
        """What of a step is recorded: all that the device does behind the copies."""
        token_ids = batch.token_ids if self.steps is None else self.steps.fed(batch)
        rotations = self.rope.lookup(batch.attention.positions, batch.rope_lengths, batch.longest)
        started = time.perf_counter()
        taps = self.drafter.taps if self.drafter is not None else ()
        hidden, features = self.model.forward_tapped(token_ids, rotations, self.caches, batch.attention, batch.sample_rows, taps)
        if self.drafter is not None:
            absorbing = time.perf_counter()
            self.drafter.absorb(replace(batch, token_ids=token_ids), rotations, features)
            self.absorb_s += time.perf_counter() - absorbing
        logits = self.model.logits(hidden) if hidden.shape[0] else None
        if self.steps is None:
            self.forward_s += time.perf_counter() - started
        return logits

    @torch.inference_mode()
    def _draw(self, logits: torch.Tensor | None, sampling: list[ScheduledSequence]) -> StepOutput:
        """Draw tokens for each sequence that asks for one, on the host: see `speculation.verify`."""
        if logits is None:
            return StepOutput([])
        started = time.perf_counter()
        gained = self.verify(self.sampler, logits, sampling)
        self.sampling_s += time.perf_counter() - started
        self._settle(sampling, gained)
        return StepOutput(gained)

    def _settle(self, sampling: list[ScheduledSequence], gained: list[Verified]) -> None:
        """Bring the keys and values of accepted nodes, which were computed for these very positions, to where their positions are: before
        the sequences' next step, and behind the steps that are under way."""
        moves = accepted_moves(sampling, gained, self.block_size)
        if not moves:
            return
        if self.steps is None:
            self._move_slots(moves)
        else:
            self.steps.then(lambda: self._move_slots(moves))

    @torch.inference_mode()
    def _move_slots(self, moves: list[tuple[int, int]]) -> None:
        (pairs,) = stage([np.asarray(moves, np.int64)], self.device)
        source, target = pairs.t().contiguous()
        for k_cache, v_cache in self.caches:
            self.model.kernels.copy_slots(k_cache, v_cache, source, target)
        if self.drafter is not None:
            self.drafter.copy_slots(source, target)

    def _copy_blocks(self, groups: list[torch.Tensor]) -> None:
        for pairs in groups:
            source, target = pairs.t().contiguous()
            for k_cache, v_cache in self.caches:
                self.model.kernels.copy_blocks(k_cache, v_cache, source, target)
            if self.drafter is not None:
                self.drafter.copy_blocks(source, target)
