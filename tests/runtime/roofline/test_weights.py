"""Bytes of weights: by hand for one linear, and against the files of real engines for whole models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_runs import tiny_engine

from dspark.converters.pipeline import quantize
from dspark.runtime.roofline.weights import HEAD, ModelShape, linear_bytes
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import PRESETS, QuantConfig, QuantScheme, preset

N, K = 96, 64
MODEL = ModelConfig("llama", 1000, 64, 160, 2, 4, 2, 16, 1e-6, 4096)


@pytest.mark.parametrize(
    ("scheme", "stored", "on_cpu"),
    [
        (None, 96 * 64 * 2, 96 * 64 * 2),
        (QuantScheme("w8a16", 8), 96 * 64 + 96 * 2, 96 * 64 + 96 * 2),
        (QuantScheme("w4a16", 4, group_size=32), 96 * 64 // 2 + 2 * 96 * 2, 96 * 64 // 2 + 2 * 96 * 2),
        (QuantScheme("w4a16-asym", 4, False, 32), 96 * 64 // 2 + 2 * 96 * 3, 96 * 64 // 2 + 2 * 96 * 3),
        (QuantScheme("w3a16", 3, group_size=32), 96 * 6 * 4 + 2 * 96 * 2, 96 * 64 // 2 + 2 * 96 * 2),
        (QuantScheme("w2a16", 2, group_size=64), 96 * 64 // 4 + 96 * 2, 96 * 64 // 2 + 96 * 2),
        (QuantScheme("w4a16", 4, group_size=64, act_order=True), 96 * 32 + 96 * 2 + 64 * 4, 96 * 32 + 96 * 2 + 64 * 4),
        (QuantScheme("w8a8", 8, storage="int8"), 96 * 64 + 96 * 4, 96 * 64 + 96 * 4),
        (QuantScheme("fp8", 8, storage="fp8", block=(1, -1)), 96 * 64 + 96 * 4, 96 * 64 * 2),
        (QuantScheme("fp8", 8, storage="fp8", block=(-1, -1), inputs="static"), 96 * 64 + 4 + 4, 96 * 64 * 2),
        (QuantScheme("fp8-block", 8, storage="fp8", block=(64, 48)), 96 * 64 + 2 * 2 * 4, 96 * 64 * 2),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_one_linear(scheme: QuantScheme | None, stored: int, on_cpu: int) -> None:
    """3-bit codes are packed in the file and take lanes of four bits on a CPU; float8 is expanded there."""
    assert linear_bytes(scheme, N, K, "bfloat16") == stored
    assert linear_bytes(scheme, N, K, "bfloat16", "cpu") == on_cpu


def file_bytes(engine: Path) -> int:
    """Of all tensors, read off the sizes of the files: eight bytes and a header stand before the data."""
    total = 0
    for path in engine.glob("weights-*.safetensors"):
        with path.open("rb") as file:
            total += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    return total


def shape_of(engine: Path) -> ModelShape:
    manifest = load_manifest(engine)
    return ModelShape(manifest.model, manifest.quant)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("dense"), "llama-bias", dtype="bfloat16")


@pytest.mark.parametrize("scheme", list(PRESETS))
def test_the_files_of_every_scheme_have_these_bytes(dense: Path, tmp_path: Path, scheme: str) -> None:
    quantize(dense, tmp_path / "engine", scheme, audit=False)
    shape = shape_of(tmp_path / "engine")
    assert shape.quant is not None and shape.quant.scheme.name == scheme
    assert shape.weight_bytes == file_bytes(tmp_path / "engine")


@pytest.mark.parametrize("family", ["llama-tied", "qwen3", "gemma2", "olmo2", "qwen2_moe", "qwen3_moe-mixed"])
@pytest.mark.parametrize("scheme", [None, "w4a16"])
def test_the_files_of_families_have_these_bytes(tmp_path: Path, family: str, scheme: str | None) -> None:
    """Tied heads, norms of heads, norms after blocks, experts; routers stay dense."""
    engine = tiny_engine(tmp_path, family, scheme=scheme)
    assert shape_of(engine).weight_bytes == file_bytes(engine)


def test_a_tied_head_is_a_linear_and_no_second_table() -> None:
    tied = ModelShape(replace(MODEL, tie_word_embeddings=True))
    assert tied.linears[HEAD].num_bytes == 1000 * 64 * 2
    assert ModelShape(MODEL).weight_bytes - tied.weight_bytes == 1000 * 64 * 2


def test_arithmetic_is_in_8_bits_only_where_activations_are_rounded() -> None:
    fp8 = preset("fp8")
    found = {
        name: ModelShape(MODEL, QuantConfig(scheme), layout=layout).linears["model.layers.1.mlp.up_proj"].arithmetic
        for name, scheme, layout in (
            ("w4a16", preset("w4a16"), "stored"),
            ("w8a8", preset("w8a8"), "stored"),
            ("fp8", fp8, "stored"),
            ("fp8 inputs", replace(fp8, inputs="dynamic"), "stored"),
            ("fp8 inputs on a CPU", replace(fp8, inputs="dynamic"), "cpu"),
        )
    }
    assert found == {"w4a16": "bfloat16", "w8a8": "int8", "fp8": "bfloat16", "fp8 inputs": "fp8", "fp8 inputs on a CPU": "bfloat16"}


def test_ranks_share_heads_and_inner_widths_and_hold_kv_heads_twice_where_they_must() -> None:
    whole, half, quarter = (ModelShape(MODEL, tensor_parallel=ranks) for ranks in (1, 2, 4))
    q, k, o, down, head = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj", HEAD)

    def size(shape: ModelShape, leaf: str) -> tuple[int, int]:
        linear = shape.linears[leaf if leaf == HEAD else f"model.layers.0.{leaf}"]
        return linear.num_outputs, linear.num_inputs

    assert [size(whole, leaf) for leaf in (q, k, o, down, head)] == [(64, 64), (32, 64), (64, 64), (64, 160), (1000, 64)]
    assert [size(half, leaf) for leaf in (q, k, o, down, head)] == [(32, 64), (16, 64), (64, 32), (64, 80), (500, 64)]
    assert [size(quarter, leaf) for leaf in (q, k, o, down, head)] == [(16, 64), (16, 64), (64, 16), (64, 40), (250, 64)]
    assert [shape.kv_bytes_per_token for shape in (whole, half, quarter)] == [256, 128, 128]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel is 5, allowed: from 1 to 4"):
        ModelShape(MODEL, tensor_parallel=5)
    with pytest.raises(ValueError, match="kv_dtype is 'int4'"):
        ModelShape(MODEL, kv_dtype="int4")
    with pytest.raises(ValueError, match="layout is 'gpu'"):
        ModelShape(MODEL, layout="gpu")
