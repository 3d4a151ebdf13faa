"""Data sheets: times by hand, GPUs found by their names, and what no data sheet may contradict."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.runtime.roofline.devices import DEVICES, Device, find_device
from dspark.runtime.roofline.ops import Op, decode, step_ops
from dspark.runtime.roofline.weights import ModelShape
from dspark.runtime.spec.model_config import ModelConfig

DEVICE = Device("a device", 100.0, {"float32": 10.0, "bfloat16": 40.0}, cache_bytes=50, link=5.0)


@pytest.mark.parametrize(
    ("op", "cold", "seconds"),
    [
        (Op("memory", "bfloat16", 40, 300, 100, 60), False, 4.1),
        (Op("arithmetic", "bfloat16", 400, 300), False, 10),
        (Op("vectors", "float32", 400, 300), False, 40),
        (Op("link", "float32", 0, 0, 0, 0, 100), False, 20),
        (Op("held in the cache", "float32", 0, 100, 0, 50), False, 1),
        (Op("cold", "float32", 0, 100, 0, 50), True, 1.5),
        (Op("widened", "int8", 80, 0), False, 2),
    ],
    ids=lambda value: value.name if isinstance(value, Op) else "",
)
def test_the_slowest_of_memory_arithmetic_and_link_counts(op: Op, cold: bool, seconds: float) -> None:
    assert DEVICE.seconds(op, cold) == pytest.approx(seconds)


def test_operations_follow_one_another() -> None:
    ops = [Op("memory", "bfloat16", 0, 300), Op("arithmetic", "bfloat16", 400)]
    assert DEVICE.total_seconds(ops) == pytest.approx(3 + 10)


def test_arithmetic_that_is_lacking_is_done_in_what_it_is_widened_to() -> None:
    assert DEVICES["a100-80"].rate("fp8") == DEVICES["a100-80"].rate("bfloat16") == 312e12
    assert DEVICES["h100"].rate("fp8") == 2 * DEVICES["h100"].rate("bfloat16")
    assert Device("old", 1.0, {"float32": 3.0}).rate("bfloat16") == 3.0
    with pytest.raises(ValueError, match="no arithmetic rate of empty is known for int8"):
        Device("empty", 1.0, {}).rate("int8")


@pytest.mark.parametrize(
    ("gpu", "memory_gb", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 42, "A100 40 GB"),
        ("NVIDIA A100-SXM4-80GB", 85, "A100 80 GB"),
        ("NVIDIA A100 80GB PCIe", 85, "A100 80 GB"),
        ("NVIDIA L40S", 48, "L40S"),
        ("NVIDIA H100 80GB HBM3", 85, "H100 SXM"),
        ("NVIDIA H200", 150, "H200"),
    ],
)
def test_gpus_are_found_by_the_names_that_drivers_give(gpu: str, memory_gb: int, name: str) -> None:
    found = find_device(gpu, memory_gb * 10**9)
    assert found is not None and found.name == name


@pytest.mark.parametrize("gpu", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB", "NVIDIA L40", "Tesla T4"])
def test_other_gpus_are_not_taken_for_these(gpu: str) -> None:
    assert find_device(gpu, 80 * 10**9) is None


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_data_sheets_are_whole_and_plausible(device: Device) -> None:
    """Fewer bits are never slower, and a card goes through its own memory in 15 to 60 milliseconds."""
    rates = [device.rate(name) for name in ("float32", "bfloat16", "int8")]
    assert rates == sorted(rates) and device.source and device.link < device.bandwidth
    assert 0.015 < device.memory_bytes / device.bandwidth < 0.06


MODEL = ModelConfig("llama", 1000, 64, 160, 2, 4, 2, 16, 1e-6, 4096)


@given(st.integers(1, 500), st.integers(1, 2000), st.integers(1, 500), st.sampled_from(sorted(DEVICES)))
def test_a_larger_step_takes_no_less_time_and_less_for_each_token(sequences: int, context: int, more: int, name: str) -> None:
    shape, device = ModelShape(MODEL), replace(DEVICES[name], cache_bytes=0)
    small, large = (device.total_seconds(step_ops(shape, decode(n, context))) for n in (sequences, sequences + more))
    assert small <= large <= small * (sequences + more) / sequences * (1 + 1e-9)
