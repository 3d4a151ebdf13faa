"""How much memory a run may take, and how it becomes KV blocks."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from dspark.runtime.execution.memory import available_bytes, kv_pool_bytes, num_blocks
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import UsageError

GB = 10**9


class Machine:
    available = 20 * GB


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", Machine)


def control_group(directory: Path, limit: str, current: int, inactive_file: int) -> Path:
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{current}\n")
    (directory / "memory.stat").write_text(f"anon 5\nfile {2 * inactive_file}\ninactive_file {inactive_file}\n")
    return directory


@pytest.mark.parametrize(
    ("limit", "current", "inactive_file", "free"),
    [
        ("max", GB, 0, 20 * GB),
        (str(8 * GB), GB, 0, 7 * GB),
        (str(8 * GB), 7 * GB, 5 * GB, 6 * GB),
        (str(90 * GB), GB, 0, 20 * GB),
        (str(8 * GB), 9 * GB, 0, 0),
    ],
)
def test_the_control_group_counts_where_it_leaves_less(tmp_path: Path, limit: str, current: int, inactive_file: int, free: int) -> None:
    """A container's limit, not the host's memory; files that were written a moment ago (an engine) are given up on demand."""
    assert available_bytes(control_group(tmp_path, limit, current, inactive_file)) == free


def test_without_a_control_group_the_machine_counts(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 20 * GB
    (tmp_path / "memory.max").write_text(f"{8 * GB}\n")
    (tmp_path / "memory.current").write_text("damaged")
    assert available_bytes(tmp_path) == 20 * GB


def test_the_default_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 tokens a sequence, at least one of the full length, and never more than half of what is free."""
    config, block_bytes = EngineConfig(), 1_000_000
    assert config.default_pool_tokens(8192) == 64 * 512
    assert config.default_pool_tokens(100_001) == 100_016
    assert kv_pool_bytes(config, "cpu", block_bytes, 8192) == 64 * 512 // 16 * block_bytes
    assert kv_pool_bytes(config, "cpu", 10 * block_bytes, 8192) == 10 * GB
    assert num_blocks(2_500_000, block_bytes) == 2
    with pytest.raises(UsageError, match="hold no block"):
        num_blocks(999_999, block_bytes)


def test_more_than_is_free_is_refused() -> None:
    with pytest.raises(UsageError, match="this machine has 20000000000 bytes of memory free"):
        kv_pool_bytes(EngineConfig(kv_cache_memory_bytes=21 * GB), "cpu", 1, 8192)
