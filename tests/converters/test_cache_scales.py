"""Scales of a KV cache that a source brings: kept as they are where they mean something, named and left out where they do not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_engines import calibrated
from lora_cases import make_adapter
from quantized_checkpoints import base_model, save_quantized
from tiny_models import make_tiny_checkpoint

from dspark.converters.exporters.base import export
from dspark.converters.pipeline import convert, quantize
from dspark.converters.readers.cache_scales import read_scheme
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.logits import logits_for
from dspark.runtime.spec.kv_cache import KVCacheConfig
from dspark.runtime.spec.manifest import load_manifest

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
PROMPT = [5, 9, 33, 70, 120, 7, 8, 301, 44, 45]


def checkpoint(path: Path, scales: dict[str, torch.Tensor], scheme: dict[str, Any] | None = SCHEME) -> Path:
    """A checkpoint of two layers and two key/value heads in which nothing but the cache is quantized, with these further tensors."""
    config, state = base_model(29)
    described = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": scheme}
    return save_quantized(path, config, {**state, **scales}, described)


def scales_of(shape: tuple[int, ...], first: float = 2**-6) -> dict[str, torch.Tensor]:
    """A different number in every element of every scale, exact in 16 bits."""
    names = [f"model.layers.{layer}.self_attn.{leaf}" for layer in range(2) for leaf in ("k_scale", "v_scale")]
    count = torch.Size(shape).numel()
    return {name: (first + 2**-7 * torch.arange(count)).reshape(shape) * (i + 1) for i, name in enumerate(names)}


@pytest.mark.parametrize(("shape", "strategy", "granularity"), [((1,), "tensor", "tensor"), ((2, 1, 1), "attn_head", "head")])
def test_a_compressed_tensors_cache_is_kept(tmp_path: Path, shape: tuple[int, ...], strategy: str, granularity: str) -> None:
    """Spread over heads and channels; audited, and what generate takes by default."""
    scales = scales_of(shape)
    result = convert(checkpoint(tmp_path / "ckpt", scales, {**SCHEME, "strategy": strategy}), tmp_path / "engine")
    assert result.manifest.kv_cache == KVCacheConfig("fp8", granularity, "compressed-tensors")
    assert "not audited" not in result.manifest.audit["summary"]
    assert not any("not used" in note for note in result.notes)
    model = load_model(tmp_path / "engine", kv_cache_dtype="auto")
    for layer in range(2):
        for leaf in "kv":
            stored = getattr(model.layers[layer].attention.kv_scales, leaf)
            want = scales[f"model.layers.{layer}.self_attn.{leaf}_scale"].float().reshape(-1, 1).expand(2, result.manifest.model.head_dim)
            assert stored.dtype == torch.float32 and torch.equal(stored, want)
    assert model.kernels.facts.kv_dtype == torch.float8_e4m3fn
    plain = logits_for(load_model(tmp_path / "engine"), PROMPT)
    error = (logits_for(model, PROMPT) - plain).abs().max() / plain.abs().max()
    assert 0 < error < 0.5


@pytest.mark.parametrize(
    ("scales", "scheme", "reason"),
    [
        (scales_of((1,)), None, "the config has no kv_cache_scheme"),
        ({}, SCHEME, "model.layers.0.self_attn.k_scale is missing"),
        (dict(list(scales_of((1,)).items())[:-1]), SCHEME, "model.layers.1.self_attn.v_scale is missing"),
        (scales_of((1,), 0.0), SCHEME, "model.layers.0.self_attn.k_scale is not positive"),
        (scales_of((4,)), SCHEME, "model.layers.0.self_attn.k_scale has shape [4]"),
        ({name: torch.ones(1) for name in scales_of((1,))}, SCHEME, "every scale is 1, so nothing was calibrated"),
    ],
)
def test_scales_that_do_not_do_are_named(
    tmp_path: Path, scales: dict[str, torch.Tensor], scheme: dict[str, Any] | None, reason: str
) -> None:
    """A scale of 1.0 is what is there before calibration: taken for one, it costs a Llama 70B 6 % of perplexity (vLLM issue 12076)."""
    result = convert(checkpoint(tmp_path / "ckpt", scales, scheme), tmp_path / "engine", audit=False)
    assert result.manifest.kv_cache is None and not any("_scale" in name for name in result.manifest.tensors)
    note = next(note for note in result.notes if "the KV cache keeps the model's dtype" in note)
    assert f"({len(scales)} scales) is not used" in note
    assert note.endswith(reason)


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"type": "int"}, KVCacheConfig("int8", "tensor", "ct")),
        ({"strategy": None}, KVCacheConfig("fp8", "tensor", "ct")),
        ({"dynamic": True}, "dynamic scales are not supported"),
        ({"symmetric": False}, "zero points are not supported"),
        ({"num_bits": 4}, "4-bit float is not supported"),
        ({"strategy": "token"}, "strategy token is not supported"),
    ],
)
def test_schemes(change: dict[str, Any], want: KVCacheConfig | str) -> None:
    assert read_scheme({**SCHEME, **change}, "ct") == want


@pytest.fixture(scope="module")
def int8(tmp_path_factory) -> Path:
    """A dense engine that is calibrated for an int8 cache."""
    folder = tmp_path_factory.mktemp("int8")
    convert(make_tiny_checkpoint(folder / "checkpoint", "llama"), folder / "plain", audit=False)
    return calibrated(folder / "plain", folder / "engine", "int8", [list(range(5, 95))])


def test_quantizing_an_engine_keeps_its_cache(int8: Path, tmp_path: Path) -> None:
    result = quantize(int8, tmp_path / "engine", "w8a16")
    source = load_manifest(int8)
    assert result.manifest.kv_cache == source.kv_cache
    for name in ("model.layers.0.self_attn.k_scale", "model.layers.1.self_attn.v_scale"):
        assert replace(result.manifest.tensors[name], shard="") == replace(source.tensors[name], shard="")
    assert any("the scales of the KV cache are the source's: int8, a scale per channel" in note for note in result.notes)
    assert load_model(tmp_path / "engine", kv_cache_dtype="int8").kernels.facts.kv_dtype == torch.int8


def test_adapters_end_a_calibration(int8: Path, tmp_path: Path) -> None:
    """They change the keys and values that the scales were made for."""
    adapter = make_adapter(tmp_path / "adapter", int8.parent / "checkpoint")
    result = convert(int8, tmp_path / "engine", adapters=[(adapter, 1.0)], audit=False)
    assert result.manifest.kv_cache is None
    assert any("calibrated without the adapters" in note for note in result.notes)


def test_exports_have_no_scales_of_the_cache(int8: Path, tmp_path: Path) -> None:
    result = export(int8, tmp_path / "out", "hf")
    assert any("the scales of the KV cache are not exported" in note for note in result.notes)
