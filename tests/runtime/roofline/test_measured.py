"""Measurements beside the limit, by hand, and what is said of documents that are none."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from dspark.runtime.roofline.devices import Device
from dspark.runtime.roofline.measured import measured_job, timed_kernels
from dspark.runtime.roofline.ops import Group, Step, step_ops
from dspark.runtime.roofline.weights import ModelShape
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import preset

DEVICE = Device("a device", 1e6, {"float32": 1e6, "bfloat16": 1e8, "int8": 2e8}, cache_bytes=10**9)
LINEAR = {"op": "linear", "rows": 3, "outputs": 96, "inputs": 64, "dtype": "bfloat16", "seconds": 0.1}
ATTENTION = {"op": "paged_attention", "num_seqs": 2, "query_tokens": 1, "context_tokens": 50, "num_heads": 4, "num_kv_heads": 2}
ATTENTION |= {"head_dim": 16, "dtype": "bfloat16", "seconds": 0.1}


@pytest.mark.parametrize(
    ("record", "num_bytes"),
    [
        (LINEAR, 96 * 64 * 2 + 3 * (64 + 96) * 2),
        (LINEAR | {"scheme": asdict(replace(preset("w4a16"), group_size=32))}, 96 * 32 + 2 * 96 * 2 + 3 * 160 * 2),
        (ATTENTION, 2 * (2 * 2 * 16 * 50 * 2 + 2 * 4 * 16 * 2)),
        (ATTENTION | {"kv_dtype": "int8"}, 2 * (2 * 2 * 16 * 50 + 2 * 4 * 16 * 2)),
        (ATTENTION | {"window": 20}, 2 * (2 * 2 * 16 * 20 * 2 + 2 * 4 * 16 * 2)),
        ({"op": "add_rms_norm", "rows": 5, "size": 64, "dtype": "float32", "seconds": 0.1}, 4 * 5 * 64 * 4),
    ],
    ids=["dense", "w4a16", "attention", "int8 cache", "window", "norm"],
)
def test_a_kernel_that_waits_for_memory(record: dict[str, Any], num_bytes: int) -> None:
    """At a byte a microsecond; inputs are cold, however large the cache."""
    (found,) = timed_kernels({"timings": [record]}, DEVICE)
    assert found.bound == "memory" and found.limit_s == pytest.approx(num_bytes / 1e6)
    assert found.fraction == pytest.approx(num_bytes / 1e6 / 0.1)


def test_a_kernel_that_computes() -> None:
    """8-bit activations count at the rate of 8-bit products."""
    record = LINEAR | {"rows": 10_000, "scheme": asdict(preset("w8a8"))}
    slow_arithmetic = replace(DEVICE, rates={"float32": 1.0, "bfloat16": 1e3, "int8": 2e3})
    (found,) = timed_kernels({"timings": [record]}, slow_arithmetic)
    assert (found.bound, found.limit_s) == ("arithmetic", pytest.approx(2 * 10_000 * 96 * 64 / 2e3))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "no 'timings'"),
        ({"timings": []}, "no 'timings'"),
        ({"timings": [LINEAR, {"op": "sort", "seconds": 1}]}, r"timings\[1\] cannot be read \(KeyError\('sort'\)\)"),
        ({"timings": [{**LINEAR, "rows": None}]}, r"timings\[0\] cannot be read"),
        ({"timings": [{**LINEAR, "seconds": 0}]}, "seconds 0.0, allowed: above 0"),
        ({"timings": [{**LINEAR, "dtype": "int3"}]}, "int3"),
    ],
)
def test_timings_that_cannot_be_read_are_named(document: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        timed_kernels(document, DEVICE)


SHAPE = ModelShape(ModelConfig("llama", 1000, 64, 160, 2, 4, 2, 16, 1e-6, 4096))
METRICS: dict[str, Any] = {
    "lines": {"total": 12, "ok": 10, "failed": 2, "resumed": 0},
    "tokens": {"prompt": 1000, "cached": 200, "output": 500},
    "engine": {"num_steps": 125, "forward_s": 30.0},
}


def test_a_job_is_held_against_as_many_mean_steps() -> None:
    """490 tokens decoded at 125 in the context, ten prompts of 100 of which 80 are computed."""
    found = measured_job(METRICS, SHAPE, DEVICE)
    step = Step((Group(490 / 125, 1, 125), Group(10 / 125, 80, 100)))
    assert found.limit_s == pytest.approx(125 * DEVICE.total_seconds(step_ops(SHAPE, step)))
    assert found.seconds == 30.0 and found.name == "125 steps of 10.3 tokens" and found.bound == "memory"


@pytest.mark.parametrize(
    ("change", "words"),
    [({"engine": {}}, "num_steps"), ({"lines": None}, "cannot be read"), ({"tokens": {"prompt": 1, "cached": 0, "output": 0}}, "nothing")],
)
def test_metrics_without_a_job_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        measured_job(METRICS | change, SHAPE, DEVICE)
