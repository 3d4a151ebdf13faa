"""This CPU, measured: figures that such a machine can have, and what is read off the system."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from dspark.runtime.roofline.machine import LEAST_BYTES, cache_bytes, measured_cpu, memory_bandwidth, product_rate


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Whatever a test sets, later tests have their own number of threads."""
    before = torch.get_num_threads()
    yield  # type: ignore[misc]
    torch.set_num_threads(before)


def test_a_measured_cpu_has_a_bandwidth_and_a_rate_of_each_dtype() -> None:
    device = measured_cpu(1, ("bfloat16", "int8"), 0, turns=1)
    assert set(device.rates) == {"bfloat16", "int8", "float32"}
    assert device.name == "this CPU, 1 thread" and f"{LEAST_BYTES >> 20} MiB" in device.source
    assert 1e7 < device.bandwidth < 1e13 and all(1e7 < rate < 1e14 for rate in device.rates.values())
    assert torch.get_num_threads() == 1


def test_rates_are_those_of_products_that_were_run() -> None:
    """Twice M N K over the time of the larger product, within what a busy machine makes of two runs of one thing."""
    x, weight = torch.ones(256, 1024), torch.ones(1024, 1024)
    torch.nn.functional.linear(x, weight)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        best = min(best, time.perf_counter() - started)
    seen = 2 * 256 * 1024 * 1024 / best
    assert seen / 30 < product_rate("float32") < 30 * seen


def test_memory_is_not_faster_than_its_buffer_is_read() -> None:
    """A gigabyte in a microsecond would be a clock that was not read."""
    assert 1e7 < memory_bandwidth(LEAST_BYTES, 2) < 1e13


@pytest.mark.parametrize(
    ("sizes", "expected"), [({"index0": "32K", "index2": "1024K", "index3": "32M"}, 32 << 20), ({"index0": "odd"}, 0), ({}, 0)]
)
def test_the_last_level_cache_is_the_largest(tmp_path: Path, sizes: dict[str, str], expected: int) -> None:
    for name, text in sizes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(text + "\n")
    assert cache_bytes(tmp_path) == expected
