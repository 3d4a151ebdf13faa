"""How many KV blocks a run gets: bytes in, blocks out."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import UsageError

CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_bytes(group: Path = CONTROL_GROUP) -> int:
    """Bytes of host memory that this process may still take: the machine's or the control group's, whichever is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            available = min(available, int(limit) - _held_bytes(group))
    except (OSError, ValueError):
        pass  # no control group of the second version: the machine's figure stands
    return max(available, 0)


def _held_bytes(group: Path) -> int:
    """What a control group holds without the files that it has read or written and not lately used: the kernel drops those on demand, and
    right after a conversion they are as large as the checkpoint."""
    held = int((group / "memory.current").read_text())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return held - int(stat.get("inactive_file", 0))


def kv_pool_bytes(config: EngineConfig, device: str, block_bytes: int, max_model_len: int, step_bytes: int = 0) -> int:
    """Bytes of the KV pool: what the user said; else on a GPU the share of its memory that is still free of weights, less step_bytes (what
    the largest step takes, see `profile`), on a CPU enough for max_num_seqs ordinary sequences (at least one of the full length), and
    never more than half of the free memory. Raises UsageError when more is wanted than is free: the pool fills up in the course of the
    night."""
    if config.kv_cache_memory_bytes is not None:
        free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_bytes()
        if config.kv_cache_memory_bytes > free:
            raise UsageError(
                f"--kv-cache-memory-bytes is {config.kv_cache_memory_bytes}, this machine has {free} bytes of memory free",
                "type less, or leave the flag out",
            )
        return config.kv_cache_memory_bytes
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return max(int(free - (1.0 - config.gpu_memory_utilization) * total) - step_bytes, 0)
    blocks = config.default_pool_tokens(max_model_len) // config.block_size
    return min(blocks * block_bytes, available_bytes() // 2)


def num_blocks(pool_bytes: int, block_bytes: int) -> int:
    """Whole blocks in the pool. Raises UsageError when there is room for none."""
    blocks = pool_bytes // block_bytes
    if blocks < 1:
        raise UsageError(
            f"{pool_bytes} bytes for the KV cache hold no block: one has {block_bytes} bytes",
            f"type --kv-cache-memory-bytes {block_bytes * 64} or more",
        )
    return int(blocks)
