"""What runs on one rank: a plan goes in, new tokens come out."""

from __future__ import annotations

import time

import torch

from dspark.runtime.execution.forward_batch import accepted_moves, build_forward_batch
from dspark.runtime.layers.rope import RotaryTables
from dspark.runtime.models.decoder import Decoder, KVCaches
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.plan import SchedulerOutput, StepOutput
from dspark.runtime.speculation.drafter import Drafter
from dspark.runtime.speculation.verify import Verify, verify_coupled


class ModelRunner:
    """Model, KV pool and sampler of one device, and the drafter that reads the model's features if there is one.

    verify: which of a draft's tokens are kept.
    forward_s: seconds spent in the model (not in building inputs or sampling). absorb_s: in the drafter after each step.
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
    ) -> None:
        self.model = model
        self.caches = caches
        self.rope = rope
        self.sampler = sampler
        self.block_size = block_size
        self.device = device
        self.drafter = drafter
        self.verify = verify
        self.forward_s = 0.0
        self.absorb_s = 0.0
        self.sampling_s = 0.0

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> StepOutput:
        """Copy blocks, run the model over the plan's tokens, draw tokens for each sequence that asks for one: see `speculation.verify`."""
        self._copy_blocks(plan.copies)
        batch = build_forward_batch(plan, self.block_size, self.device)
        rotations = self.rope.lookup(batch.attention.positions, batch.rope_lengths)
        started = time.perf_counter()
        taps = self.drafter.taps if self.drafter is not None else ()
        hidden, features = self.model.forward_tapped(batch.token_ids, rotations, self.caches, batch.attention, batch.sample_rows, taps)
        if self.drafter is not None:
            absorbing = time.perf_counter()
            self.drafter.absorb(batch, rotations, features)
            self.absorb_s += time.perf_counter() - absorbing
        sampling = plan.sampling
        if not sampling:
            self.forward_s += time.perf_counter() - started
            return StepOutput([])
        logits = self.model.logits(hidden)
        computed = time.perf_counter()
        self.forward_s += computed - started
        gained = self.verify(self.sampler, logits, sampling)
        self.sampling_s += time.perf_counter() - computed
        self._move_accepted(accepted_moves(sampling, gained, self.block_size))
        return StepOutput(gained)

    def _move_accepted(self, moves: list[tuple[int, int]]) -> None:
        """Bring the keys and values of accepted nodes, which were computed for these very positions, to where their positions are."""
        if not moves:
            return
        source, target = torch.tensor(moves, dtype=torch.int64, device=self.device).unbind(1)
        for k_cache, v_cache in self.caches:
            self.model.kernels.copy_slots(k_cache, v_cache, source, target)
        if self.drafter is not None:
            self.drafter.copy_slots(source, target)

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if not copies:
            return
        overlapping = bool({source for source, _ in copies} & {target for _, target in copies})
        for pairs in [[pair] for pair in copies] if overlapping else [copies]:
            source, target = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
            for k_cache, v_cache in self.caches:
                self.model.kernels.copy_blocks(k_cache, v_cache, source, target)
            if self.drafter is not None:
                self.drafter.copy_blocks(source, target)
