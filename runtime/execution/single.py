"""One device, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from dspark.kernels.cpu.threads import start_pools
from dspark.kernels.triton.tuning.subjects import Load
from dspark.runtime.execution.autotune import autotune, tile_metrics
from dspark.runtime.execution.device_queue import CudaQueue, DeviceQueue
from dspark.runtime.execution.device_steps import DeviceSampler, DeviceSteps, GreedySampler
from dspark.runtime.execution.executor import PendingStep, StepTooLargeError
from dspark.runtime.execution.graphs import CudaRecorder, Record, why_not
from dspark.runtime.execution.loader import load_model, resolve_device
from dspark.runtime.execution.memory import kv_pool_bytes, num_blocks
from dspark.runtime.execution.model_runner import ModelRunner
from dspark.runtime.execution.profile import CudaMeter, largest_plan, step_bytes
from dspark.runtime.execution.spinning import governor_for
from dspark.runtime.kv.pool import allocate_pool, bytes_per_block
from dspark.runtime.layers.rope import RotaryTables
from dspark.runtime.models.decoder import Decoder
from dspark.runtime.sampling.device import DeviceRows, device_rows_for
from dspark.runtime.sampling.sampler import RowContext, Sampler, takes_the_best
from dspark.runtime.scheduling.plan import SchedulerOutput
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.cores import usable_cores
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.kv_cache import choose_cache_dtype
from dspark.runtime.spec.manifest import EngineManifest
from dspark.runtime.speculation.draft import Draft
from dspark.runtime.speculation.drafter import Drafter
from dspark.runtime.speculation.pairing import Machine, processor_name
from dspark.runtime.speculation.rejection import verify_rejection
from dspark.runtime.speculation.verify import verify_coupled

BuildDrafter = Callable[[Decoder, Sampler, int], Drafter]
"""(target, its sampler, longest sequence in tokens) -> a drafter, not allocated yet."""


class SingleExecutor:
    """Loads the model, allocates the KV pool, runs plans.

    build_drafter: makes the drafter that lives beside the model, if any. queue: where steps go (default: a GPU's stream; a CPU has none).
    record: how steps are recorded (default: CUDA graphs, where `graphs.why_not` has no reason against them).
    """

    def __init__(
        self,
        engine_dir: Path,
        manifest: EngineManifest,
        config: EngineConfig,
        max_model_len: int,
        record_gaps: bool,
        interpreted: bool,
        build_drafter: BuildDrafter | None = None,
        queue: DeviceQueue | None = None,
        record: Record | None = None,
    ) -> None:
        self.device = resolve_device(config.device)
        self.threads = config.threads or usable_cores()
        set_threads(self.threads)
        self._governor = governor_for(self.threads, usable_cores(), start_pools) if self.device == "cpu" else None
        model = load_model(
            engine_dir,
            device=self.device,
            kernels=config.kernels,
            block_size=config.block_size,
            deterministic=config.deterministic,
            weight_shadow=config.weight_shadow,
            interpreted=interpreted,
            kv_cache_dtype=config.kv_cache_dtype,
        )
        self._tuned = autotune(model, Load(config.max_num_seqs, config.max_num_batched_tokens, max_model_len), config.autotune)
        dtype = model.kernels.facts.kv_dtype
        eos = frozenset(manifest.model.eos_token_ids)
        device_rows = device_rows_for(model.kernels, eos)
        sampler = Sampler(eos, record_gaps, device_rows)
        drafter = build_drafter(model, sampler, max_model_len) if build_drafter is not None else None
        block_bytes = bytes_per_block(manifest.model, config.block_size, dtype) + (drafter.bytes_per_block if drafter else 0)
        self._rope = RotaryTables(manifest.model, max_model_len, self.device)
        queue = CudaQueue() if queue is None and self.device == "cuda" else queue
        self._steps = (
            DeviceSteps(queue, _device_sampler(record_gaps, device_rows), config.max_num_seqs, self.device) if queue is not None else None
        )
        verify = verify_rejection if config.speculative_sampling == "rejection" else verify_coupled

        def runner(num_blocks: int, drafter: Drafter | None, record: Record | None) -> ModelRunner:
            caches = allocate_pool(manifest.model, num_blocks, config.block_size, dtype, self.device)
            return ModelRunner(model, caches, self._rope, sampler, config.block_size, self.device, drafter, verify, self._steps, record)

        self._step_bytes = 0
        if self.device == "cuda" and config.kv_cache_memory_bytes is None:
            plan, blocks = largest_plan(config, max_model_len)
            self._step_bytes = step_bytes(runner(blocks, None, None), plan, max_model_len, CudaMeter())
            torch.cuda.empty_cache()
        pool_bytes = kv_pool_bytes(config, self.device, block_bytes, max_model_len, self._step_bytes)
        self.num_blocks = num_blocks(pool_bytes, block_bytes)
        self._pool_bytes = self.num_blocks * block_bytes
        if drafter is not None:
            drafter.allocate(self.num_blocks)
        taken = {op: choice["taken"] for op, choice in model.kernels.explain().items()}
        self._no_graphs, own_record = None, record
        if record is None:
            self._no_graphs = why_not(config.cuda_graphs, self.device, taken, manifest.model.num_experts > 0, drafter)
            record, own_record = (CudaRecorder(), CudaRecorder()) if self._no_graphs is None else (None, None)
        if drafter is not None and own_record is not None:
            drafter.record(own_record)
        self._runner = runner(self.num_blocks, drafter, record)
        self._drafter, self._draft_s = drafter, 0.0
        self._dtype = manifest.model.dtype
        self._cache_dtype = choose_cache_dtype(manifest.kv_cache, manifest.model.dtype, config.kv_cache_dtype)

    @property
    def steps_ahead(self) -> bool:
        return self._steps is not None

    def submit(self, plan: SchedulerOutput) -> PendingStep:
        """Start one step."""
        if self._governor is not None:
            self._governor.observe()
        try:
            return self._runner.submit(plan)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            reason = (str(error).strip() or "no memory").splitlines()[0]
        if self.device == "cuda":  # by now the failed step's tensors are gone
            torch.cuda.empty_cache()
        raise StepTooLargeError(reason)

    def draws_alone(self, seq: Sequence) -> bool:
        return self._steps is not None and self._steps.sampler.draws_alone(seq)

    def draft(self, sequences: list[Sequence], rooms: list[int]) -> list[Draft | None]:
        """Drafts of the drafter, see `Drafter.draft`; none without one. A step of other sequences may be under way."""
        drafter = self._runner.drafter
        if drafter is None:
            return [None] * len(sequences)
        started = time.perf_counter()
        with self._steps.beside() if self._steps is not None else nullcontext():
            drafts = drafter.draft(sequences, rooms)
        self._draft_s += time.perf_counter() - started
        return drafts

    @property
    def draft_tokens(self) -> int:
        return self._runner.drafter.max_tokens if self._runner.drafter is not None else 0

    def use_drafter(self, used: bool) -> None:
        self._runner.drafter = self._drafter if used else None

    @property
    def machine(self) -> Machine:
        processor = torch.cuda.get_device_name() if self.device == "cuda" else processor_name()
        return Machine(processor, self.device, self.threads, self._dtype)

    def cache_salt(self, prompt_len: int) -> int:
        return self._rope.cache_salt(prompt_len)

    @property
    def recompute_at(self) -> int | None:
        return self._rope.recompute_at

    def metrics(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "dtype": self._dtype,
            "threads": self.threads,
            "kernels": {op: choice["taken"] for op, choice in self._runner.model.kernels.explain().items()},
            "tiles": tile_metrics(self._runner.model.kernels.facts.tiles, self._tuned),
            "drawn_on": "host" if self._runner.sampler.device_rows is None else "device",
            "kv_cache_dtype": self._cache_dtype,
            "kv_pool_bytes": self._pool_bytes,
            "cuda_graphs": self._runner.graphs.metrics() if self._runner.graphs is not None else {"off": self._no_graphs},
            **({"step_bytes": self._step_bytes} if self._step_bytes else {}),
            "forward_s": (self._steps.device_s if self._steps is not None else 0.0) or self._runner.forward_s,
            "sampling_s": self._runner.sampling_s,
            **(self._governor.metrics() if self._governor is not None else {}),
            **({"draft_s": self._draft_s, "absorb_s": self._runner.absorb_s} if self._runner.drafter is not None else {}),
            **(self._drafter.metrics() if self._drafter is not None else {}),
        }

    def reset_counters(self) -> None:
        if self._steps is not None:
            self._steps.device_s = 0.0
        self._runner.forward_s = self._runner.sampling_s = self._runner.absorb_s = self._draft_s = 0.0

    def shutdown(self) -> None:
        if self._governor is not None:
            self._governor.close()
        self._runner.caches.clear()


def _is_out_of_memory(error: Exception) -> bool:
    """torch's allocator of the host raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _device_sampler(record_gaps: bool, device_rows: DeviceRows | None) -> DeviceSampler:
    """What draws a step's tokens without waiting. Gaps are waited for."""
    if device_rows is not None and not record_gaps:
        return device_rows

    def takes(seq: RowContext) -> bool:
        return not record_gaps and takes_the_best(seq)

    return GreedySampler(takes)


def set_threads(threads: int) -> None:
    """Threads of torch's and numba's compiled loops."""
    import numba

    torch.set_num_threads(threads)
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
