"""Which format a path holds: content decides, and what is not read is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from case_checkpoints import llama_config, llama_state, save_checkpoint, write_gguf
from safetensors.torch import save_file

from dspark.converters.detect import open_checkpoint
from dspark.converters.pipeline import convert
from dspark.runtime.spec.errors import InputError, UnsupportedError


def checkpoint(tmp_path: Path, extra: dict[str, torch.Tensor] | None = None, **changes: object) -> Path:
    config = llama_config(**changes)
    return save_checkpoint(tmp_path / "ckpt", config, {**llama_state(llama_config()), **(extra or {})})


def test_each_readable_format(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)
    assert open_checkpoint(source).format == "safetensors"
    write_gguf(tmp_path / "model.bin", llama_config(), llama_state(llama_config()))
    assert open_checkpoint(tmp_path / "model.bin").format == "gguf"  # by its magic, not its name
    convert(source, tmp_path / "engine", audit=False)
    assert open_checkpoint(tmp_path / "engine").format == "engine"


@pytest.mark.parametrize(
    ("tensors", "format"),
    [
        ({"q.qweight": (16, 64), "q.scales": (4, 64)}, "gptq"),
        ({"q.qweight": (16, 64), "q.scales": (16, 64), "q.g_idx": (128,)}, "gptq"),
        ({"q.qweight": (128, 8), "q.scales": (4, 64)}, "awq"),
        ({"q.qweight": (64, 32), "q.scales": (64, 32), "q.qzeros": (64, 4)}, "awq"),  # gemv, K 256 in groups of 32
        ({"q.weight_packed": (64, 16), "q.weight_scale": (64, 4)}, "compressed-tensors"),
        ({"q.weight_scale": (64, 1)}, "compressed-tensors"),
        ({"q.weight_scale_inv": (1, 1)}, "fp8"),
    ],
)
def test_quantized_formats_are_told_apart_by_shapes(tmp_path: Path, tensors: dict, format: str) -> None:
    """No config says what they are; GPTQ and AWQ use the same names."""
    extra = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in tensors.items()}
    assert open_checkpoint(checkpoint(tmp_path, extra)).format == format


@pytest.mark.parametrize(
    ("tensors", "changes", "name"),
    [
        ({"q.qweight": (8, 128), "q.scales": (4, 64)}, {}, "Marlin"),
        ({"q.B": (8, 128), "q.s": (4, 64)}, {}, "Marlin"),
        ({"q.weight.absmax": (2, 2)}, {}, "bitsandbytes"),
        ({}, {"quantization_config": {"quant_method": "hqq"}}, "quantized"),
    ],
)
def test_other_quantized_formats_are_refused_by_name(tmp_path: Path, tensors: dict, changes: dict, name: str) -> None:
    extra = {tensor: torch.zeros(shape, dtype=torch.int32) for tensor, shape in tensors.items()}
    with pytest.raises(UnsupportedError, match=rf"format {name}, which is not supported yet"):
        open_checkpoint(checkpoint(tmp_path, extra, **changes))


def test_an_adapter_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UnsupportedError, match="LoRA adapter"):
        open_checkpoint(tmp_path)


def test_a_path_that_is_not_there_hints_at_a_download(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        open_checkpoint("meta-llama/Nothing-1B")
    assert "hf download" in caught.value.hint


def test_other_things_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no checkpoint"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError, match="no checkpoint"):
        open_checkpoint(tmp_path / "notes.txt")
    source = checkpoint(tmp_path)
    with pytest.raises(InputError) as caught:
        open_checkpoint(source / "model.safetensors")
    assert str(source) in caught.value.hint
    (source / "model.safetensors").rename(source / "weights.safetensors")
    with pytest.raises(InputError) as caught:
        open_checkpoint(source)
    assert "weights.safetensors" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}, "model type 'gemma' is not supported, supported: llama"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification' is not supported"),
        ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "rope scaling 'su' is not supported, supported: default"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_what_a_config_asks_for_and_is_not_there(tmp_path: Path, changes: dict, words: str) -> None:
    source = checkpoint(tmp_path)
    (source / "config.json").write_text(json.dumps(llama_config(**changes)))
    with pytest.raises(UnsupportedError, match=words):
        convert(source, tmp_path / "engine", audit=False)
