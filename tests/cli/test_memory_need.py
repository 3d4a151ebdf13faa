"""What a run would need, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dspark.runtime.spec.kv_cache import KVCacheConfig
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import QuantConfig, QuantScheme, preset
from dspark_cli.memory_need import PROGRAM_BYTES, memory_need, weight_bytes

MODEL = ModelConfig("llama", 1000, 64, 160, 3, 4, 2, 16, 1e-6, 50_000, dtype="bfloat16")
LINEARS = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 160  # of one layer
DENSE = 3 * 2 * 64 + 64 + 1000 * 64  # norms and the embedding
HEAD = 1000 * 64


def test_dense_weights() -> None:
    """A tied head in bfloat16 is re-laid beside the table; in float32 it is the table."""
    assert weight_bytes(MODEL, None) == 2 * (3 * LINEARS + DENSE + HEAD)
    tied = replace(MODEL, tie_word_embeddings=True)
    assert weight_bytes(tied, None) == 2 * (3 * LINEARS + DENSE + HEAD)
    assert weight_bytes(replace(tied, dtype="float32"), None) == 4 * (3 * LINEARS + DENSE)


@pytest.mark.parametrize(
    ("scheme", "bytes_of_a_layer"),
    [
        (replace(preset("w4a16"), group_size=32), LINEARS // 2 + LINEARS // 32 * 2),
        (QuantScheme("w3a16-asym", 3, False, 32), LINEARS // 2 + LINEARS // 32 * 3),
        (preset("w8a16"), LINEARS + (64 + 32 + 32 + 64 + 160 + 160 + 64) * 2),
        (QuantScheme("fp8", 8, storage="fp8", block=(-1, -1)), 2 * LINEARS),
        (QuantScheme("w8a8", 8, storage="int8"), LINEARS + (64 + 32 + 32 + 64 + 160 + 160 + 64) * 4),
    ],
    ids=lambda value: value.name if isinstance(value, QuantScheme) else "",
)
def test_quantized_weights_as_a_cpu_holds_them(scheme: QuantScheme, bytes_of_a_layer: int) -> None:
    """3-bit codes in lanes of four, fp8 expanded; the head and everything that is no linear stay dense."""
    assert weight_bytes(MODEL, QuantConfig(scheme)) == 3 * bytes_of_a_layer + 2 * (DENSE + HEAD)


def test_a_runs_need() -> None:
    """The cache holds 64 sequences of 512 tokens, or one of the whole context; an 8-bit one a byte a number."""
    need = memory_need(MODEL, None)
    assert (need.kv_tokens, need.kv_dtype, need.kv_cache_bytes) == (50_000, "bfloat16", 50_000 * 2 * 3 * 2 * 16 * 2)
    assert need.activation_bytes == 512 * (4 * 160 + 8 * 64) * 2 + 3 * 64 * 1000 * 4
    assert need.total_bytes == need.weights_bytes + need.kv_cache_bytes + need.activation_bytes + PROGRAM_BYTES
    assert need.document()["total_bytes"] == need.total_bytes and need.document()["device"] == "cpu"
    short = memory_need(replace(MODEL, max_position=4096), None, KVCacheConfig("int8", "channel"))
    assert (short.kv_tokens, short.kv_dtype, short.kv_cache_bytes) == (64 * 512, "int8", 64 * 512 * 2 * 3 * 2 * 16)
