"""All names and shapes are checked before the first tensor is written, and all faults are told at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from case_checkpoints import cast, llama_config, llama_state, save_checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, make_tiny_checkpoint, make_tiny_model

from dspark.converters.detect import open_checkpoint
from dspark.converters.mapping import linear_modules, map_checkpoint
from dspark.converters.pipeline import convert
from dspark.runtime.models.mixtral import MIXTRAL
from dspark.runtime.spec.errors import InputError, UsageError


def test_missing_unexpected_and_misshapen_are_one_error(tmp_path: Path) -> None:
    config = llama_config()
    state = llama_state(config)
    del state["model.layers.0.self_attn.q_proj.weight"], state["model.layers.1.mlp.up_proj.weight"]
    state["model.layers.0.extra.weight"] = torch.zeros(3)
    state["model.norm.weight"] = torch.zeros(7)
    with pytest.raises(InputError) as caught:
        map_checkpoint(open_checkpoint(save_checkpoint(tmp_path / "ckpt", config, state)))
    text = caught.value.one_line()
    assert "missing: model.layers.0.self_attn.q_proj.weight, model.layers.1.mlp.up_proj.weight" in text
    assert "unexpected: model.layers.0.extra.weight" in text
    assert "wrong shape: model.norm.weight has [7], the config says [128]" in text


def test_an_integer_weight_is_named(tmp_path: Path) -> None:
    config = llama_config()
    state = {**llama_state(config), "model.norm.weight": torch.ones(128, dtype=torch.int32)}
    with pytest.raises(InputError, match=r"no float type: model\.norm\.weight \(I32\)"):
        map_checkpoint(open_checkpoint(save_checkpoint(tmp_path / "ckpt", config, state)))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_mapped_whole(tmp_path: Path, family: str) -> None:
    model = map_checkpoint(open_checkpoint(make_tiny_checkpoint(tmp_path, family)))
    parts = {part.source for part in model.parts.values()}
    assert set(model.shapes) - set(model.parts) | parts == set(model.reader.tensors()) and not model.notes
    config = model.config
    with_experts = 4 + 1 + 3 * config.num_experts + (1 + 3 if config.shared_expert_intermediate_size else 0)
    per_layer = [with_experts if config.has_experts(layer) else 7 for layer in range(config.num_layers)]
    assert len(linear_modules(config)) == sum(per_layer) + (not config.tie_word_embeddings)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe-mixed"])
def test_stacked_experts_are_the_same_model(tmp_path: Path, family: str) -> None:
    """transformers 4 wrote three tensors for each expert (Mixtral: w1, w3, w2), transformers 5 may write two for all of a layer."""
    single = map_checkpoint(open_checkpoint(make_tiny_checkpoint(tmp_path / "single", family)))
    model = make_tiny_model(family)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    stacked = map_checkpoint(open_checkpoint(tmp_path / "stacked"))
    assert stacked.shapes == single.shapes and stacked.config == single.config
    assert sum(".experts." in name for name in single.shapes) == sum(part.expert is not None for part in stacked.parts.values()) > 0
    assert all(torch.equal(stacked.read(name), single.read(name)) for name in single.shapes)


def test_experts_of_another_shape_are_named(tmp_path: Path) -> None:
    """A stack that was written inputs first (E, K, N) must not be cut along the wrong side."""
    model = make_tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path, save_original_format=False)
    state = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    save_file({**state, name: state[name].transpose(1, 2).contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(InputError) as caught:
        map_checkpoint(open_checkpoint(tmp_path))
    text = caught.value.one_line()
    assert f"unexpected: {name}" in text and "missing: model.layers.1.mlp.experts.0.down_proj.weight" in text


def test_mixtral_names_on_paper() -> None:
    layer = "model.layers.3."
    assert MIXTRAL.saved_as(f"{layer}mlp.gate.weight") == f"{layer}block_sparse_moe.gate.weight"
    assert MIXTRAL.saved_as(f"{layer}mlp.experts.7.gate_proj") == f"{layer}block_sparse_moe.experts.7.w1"
    assert MIXTRAL.saved_as(f"{layer}mlp.experts.7.up_proj") == f"{layer}block_sparse_moe.experts.7.w3"
    assert MIXTRAL.saved_as(f"{layer}mlp.experts.7.down_proj.weight") == f"{layer}block_sparse_moe.experts.7.w2.weight"
    assert MIXTRAL.saved_as(f"{layer}self_attn.q_proj.weight") == f"{layer}self_attn.q_proj.weight"


def test_a_value_beyond_float16_is_refused(tmp_path: Path) -> None:
    config = llama_config()
    state = llama_state(config)
    state["model.layers.1.mlp.down_proj.weight"][3, 3] = 1e5
    source = save_checkpoint(tmp_path / "ckpt", config, state)
    with pytest.raises(InputError, match=r"down_proj\.weight has values beyond what float16 holds"):
        convert(source, tmp_path / "engine", dtype="float16", audit=False)
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_flag_wins(tmp_path: Path, dtype: str) -> None:
    config = llama_config(torch_dtype="bfloat16")
    source = save_checkpoint(tmp_path / "ckpt", config, cast(llama_state(config), "bfloat16"))
    manifest = convert(source, tmp_path / "engine", dtype=dtype, audit=False).manifest
    assert manifest.model.dtype == dtype and {record.dtype for record in manifest.tensors.values()} == {dtype}


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    config = llama_config()
    with pytest.raises(UsageError, match="allowed: auto, bfloat16, float16, float32"):
        map_checkpoint(open_checkpoint(save_checkpoint(tmp_path / "ckpt", config, llama_state(config))), "int8")


def test_generation_config_says_which_ids_end_a_text(tmp_path: Path) -> None:
    config = llama_config()
    source = save_checkpoint(tmp_path / "ckpt", config, llama_state(config))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.5}))
    manifest = convert(source, tmp_path / "engine", audit=False).manifest
    assert manifest.model.eos_token_ids == (2, 7)
    assert json.loads((tmp_path / "engine" / "generation_config.json").read_text())["temperature"] == 0.5
