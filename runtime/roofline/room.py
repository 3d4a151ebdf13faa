"""Where a job would run, and what of its memory weights and KV cache would take, before anything is loaded. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark.runtime.execution.memory import available_bytes, kv_pool_bytes, num_blocks
from dspark.runtime.roofline.weights import ModelShape
from dspark.runtime.spec.engine_config import EngineConfig


@dataclass(frozen=True)
class Room:
    """device: "cpu" or "cuda". free_bytes: before the weights are there. num_blocks: KV blocks of the pool, None where the job is for a GPU
    and this machine has none."""

    device: str
    weights_bytes: int
    free_bytes: int | None
    pool_bytes: int | None
    num_blocks: int | None

    def max_num_seqs(self, tokens_held: float, block_size: int) -> int | None:
        """Sequences that the pool holds if each has so many tokens in it."""
        return None if self.num_blocks is None else int(self.num_blocks * block_size // max(tokens_held, 1))


def room_of(shape: ModelShape, config: EngineConfig, max_model_len: int) -> Room:
    """shape: as the job's device holds the model. Drafts take room too, which is not counted.

    Raises UsageError, as the job would, for a KV cache that is larger than what is free or smaller than a block.
    """
    device = job_device(config.device)
    block_bytes = config.block_size * shape.kv_bytes_per_token
    if device == "cpu":
        pool = kv_pool_bytes(config, device, block_bytes, max_model_len)
        return _room(device, shape, available_bytes(), pool, block_bytes)
    if not torch.cuda.is_available():
        return Room(device, shape.weight_bytes, None, config.kv_cache_memory_bytes, None)
    free, total = torch.cuda.mem_get_info()
    left = free - shape.weight_bytes - int((1 - config.gpu_memory_utilization) * total)
    return _room(device, shape, free, config.kv_cache_memory_bytes or max(left, 0), block_bytes)


def job_device(wanted: str) -> str:
    """--device: "auto" is the GPU where there is one. A dry run may name one that is elsewhere."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def _room(device: str, shape: ModelShape, free_bytes: int, pool_bytes: int, block_bytes: int) -> Room:
    blocks = num_blocks(pool_bytes, block_bytes)
    return Room(device, shape.weight_bytes, free_bytes, blocks * block_bytes, blocks)
