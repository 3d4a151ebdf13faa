"""What is measured is what serves: the engine's cache, its activations in 8 bits, a checkpoint as it would be converted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_runs import tiny_engine
from kv_engines import calibrated

from dspark.converters.exporters.base import export
from dspark.converters.quality.measure import compare
from dspark.converters.quality.subject import Subject, open_subject, run_dtype
from dspark.runtime.execution.loader import choose_kernels
from dspark.runtime.spec.errors import InputError

SAMPLES = [[5, 9, 200, 31, 7, 88, 12, 3], [6, 250, 19, 77, 301] * 8]


def states(subject: Subject, dtype: str | None = None):
    return subject.states(subject.kernels(dtype, "cpu", "auto"), SAMPLES)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_the_cache_is_the_one_that_serves(tmp_path: Path, dtype: str) -> None:
    """A KV cache in 8 bits has a loss of its own, which a gate must see."""
    engine = tiny_engine(tmp_path)
    plain, cached = open_subject(engine), open_subject(calibrated(engine, tmp_path / "cached", dtype, SAMPLES))
    assert run_dtype(plain.kernels(None, "cpu", "auto")) == "float32"
    assert run_dtype(cached.kernels("bfloat16", "cpu", "auto")) == f"bfloat16 with an {dtype} KV cache"
    assert 1e-7 < compare(states(plain), states(cached), SAMPLES).mean_kl < 0.5


def test_activations_are_in_8_bits_where_they_serve_so(tmp_path: Path) -> None:
    subject = open_subject(tiny_engine(tmp_path, scheme="w8a8"))
    exact = subject.states(choose_kernels(subject.config, exact_activations=True), SAMPLES)
    assert compare(exact, states(subject), SAMPLES).mean_kl > 1e-6


def test_a_checkpoint_is_measured_as_it_would_be_converted(tmp_path: Path) -> None:
    """Its weights are first cast to the engine's dtype, so that nothing but the quantization is measured."""
    engine = tiny_engine(tmp_path, dtype="bfloat16")
    mapped = open_subject(tmp_path / "checkpoint")
    assert mapped.manifest is None and mapped.config.dtype == "float32"
    rounded = compare(states(open_subject(engine), "float32"), states(mapped), SAMPLES)
    assert 0 < rounded.mean_kl < 0.01


def test_a_quantized_checkpoint_is_no_baseline(tmp_path: Path) -> None:
    export(tiny_engine(tmp_path, scheme="w4a16"), tmp_path / "out", "gptq")
    with pytest.raises(InputError, match="is already quantized"):
        open_subject(tmp_path / "out")


def test_a_damaged_engine_is_found(tmp_path: Path) -> None:
    engine = tiny_engine(tmp_path)
    shard = next(engine.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(InputError, match="its hash differs"):
        states(open_subject(engine))
    assert torch.is_inference_mode_enabled() is False
