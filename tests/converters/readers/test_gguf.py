"""GGUF as a Hugging Face checkpoint: names, row order, config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case_checkpoints import gguf_name, llama_config, llama_state, reference_logits, token_ids, write_gguf
from engine_logits import by_transformers, relative_error

from dspark.converters.pipeline import convert
from dspark.converters.readers.gguf import GgufReader, unpermute_rows
from dspark.converters.readers.gguf_names import hugging_face_name
from dspark.converters.readers.gguf_rope import llama3_divisors
from dspark.runtime.models.hf_config import model_config_from_hf
from dspark.runtime.spec.errors import InputError, UnsupportedError


def reader(tmp_path: Path, metadata: dict[str, Any] | None = None, **changes: Any) -> GgufReader:
    config = llama_config(**changes)
    write_gguf(tmp_path / "m.gguf", config, llama_state(config), metadata=metadata)
    return GgufReader(tmp_path / "m.gguf")


def test_row_order_of_one_head_of_eight() -> None:
    """Stored order of head size 8 is 0 4 1 5 2 6 3 7; undone it is 0 to 7, per head."""
    stored = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7, 10, 14, 11, 15, 12, 16, 13, 17]).float()
    assert unpermute_rows(stored[:, None], 2)[:, 0].tolist() == [*range(8), *range(10, 18)]
    assert unpermute_rows(stored, 2).tolist() == [*range(8), *range(10, 18)]  # a bias is permuted like a column


def test_biases_of_q_and_k_are_put_back_too(tmp_path: Path) -> None:
    config = llama_config(attention_bias=True)
    state = llama_state(config, 3)
    write_gguf(tmp_path / "m.gguf", config, state)
    source = GgufReader(tmp_path / "m.gguf")
    for name in ("model.layers.1.self_attn.q_proj.bias", "model.layers.0.self_attn.k_proj.bias", "model.layers.0.self_attn.v_proj.bias"):
        assert torch.equal(source.read(name), state[name])
    convert(tmp_path / "m.gguf", tmp_path / "engine", dtype="float32", audit=False)
    want = reference_logits(config, state, token_ids())
    assert relative_error(by_transformers(tmp_path / "engine", token_ids()), want) < 1e-5


def test_qwen2_rows_stay_as_they_are(tmp_path: Path) -> None:
    config = llama_config(model_type="qwen2", attention_bias=True)
    state = {name: tensor for name, tensor in llama_state(config, 4).items() if not name.endswith("o_proj.bias")}
    write_gguf(tmp_path / "m.gguf", config, state)
    source = GgufReader(tmp_path / "m.gguf")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(source.read(name), state[name])
    manifest = convert(tmp_path / "m.gguf", tmp_path / "engine", audit=False).manifest
    assert manifest.model.family == "qwen2" and manifest.model.qkv_bias and not manifest.model.attention_out_bias


def test_qwen3_has_norms_of_q_and_k(tmp_path: Path) -> None:
    config = llama_config(model_type="qwen3")
    state = llama_state(config, 5)
    for layer in range(2):
        for part in "qk":
            state[f"model.layers.{layer}.self_attn.{part}_norm.weight"] = 1 + 0.1 * torch.randn(32)
    write_gguf(tmp_path / "m.gguf", config, state)
    manifest = convert(tmp_path / "m.gguf", tmp_path / "engine", audit=False).manifest
    assert manifest.model.qk_norm and manifest.model.head_dim == 32


def test_names_of_tensors() -> None:
    for name in llama_state(llama_config(attention_bias=True)):
        assert hugging_face_name(gguf_name(name)) == name
    assert hugging_face_name("blk.0.attn_sinks.weight") == "blk.0.attn_sinks.weight"  # unknown: reported by the check of names


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    config = llama_config()
    state = llama_state(config)
    write_gguf(tmp_path / "m.gguf", config, state)
    source = GgufReader(tmp_path / "m.gguf")
    source._places["blk.0.attn_sinks.weight"] = source._places["model.norm.weight"]
    from dspark.converters.mapping import map_checkpoint

    with pytest.raises(InputError, match=r"unexpected: blk\.0\.attn_sinks\.weight"):
        map_checkpoint(source)


def test_config_from_metadata(tmp_path: Path) -> None:
    model = model_config_from_hf(reader(tmp_path).config())
    assert (model.family, model.num_heads, model.num_kv_heads, model.head_dim, model.max_position) == ("llama", 4, 2, 32, 256)
    assert model.rms_norm_eps == 1e-6 and model.eos_token_ids == (2,) and not model.tie_word_embeddings


def test_tied_head_is_an_absent_output(tmp_path: Path) -> None:
    assert reader(tmp_path, tie_word_embeddings=True).config()["tie_word_embeddings"] is True


def test_end_of_turn_ends_a_text(tmp_path: Path) -> None:
    source = reader(tmp_path, {"tokenizer.ggml.eot_token_id": 5})
    assert source.generation_config() == {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 0}
    assert convert(tmp_path / "m.gguf", tmp_path / "e", audit=False).manifest.model.eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, ("linear", 4.0, None)),
        ({"llama.rope.scale_linear": 2.0}, ("linear", 2.0, None)),
        ({"llama.rope.scaling.type": "none"}, ("default", 1.0, None)),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 64},
            ("yarn", 4.0, 64),
        ),
    ],
)
def test_rope_scaling_metadata(tmp_path: Path, metadata: dict[str, Any], expected: tuple) -> None:
    rope = model_config_from_hf(reader(tmp_path, metadata).config()).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == expected


def test_llama3_divisors_of_the_usual_size() -> None:
    """Llama 3.1: factor 8 over 8192 tokens; waves shorter than 2048 tokens are kept, longer than 8192 divided by 8."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "rope_theta": 500000.0, "max_position_embeddings": 131072}
    scaled = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_scaling=scaling)).inv_freq
    plain = LlamaRotaryEmbedding(LlamaConfig(**sizes)).inv_freq
    assert np.allclose(llama3_divisors(16, 500000.0, 8.0, 8192), (plain / scaled).numpy(), rtol=1e-5)


def test_a_scaling_that_is_not_supported_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="longrope"):
        reader(tmp_path, {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}).config()


def test_another_architecture_is_named(tmp_path: Path) -> None:
    config = llama_config(model_type="falcon")
    write_gguf(tmp_path / "m.gguf", config, llama_state(config))
    with pytest.raises(UnsupportedError, match=r"'falcon' is not supported, supported: llama, qwen2, qwen3"):
        GgufReader(tmp_path / "m.gguf")


@pytest.mark.parametrize(("block_type", "dtype"), [(None, "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")])
def test_dtype_without_a_flag(tmp_path: Path, block_type: str | None, dtype: str) -> None:
    config = llama_config()
    write_gguf(tmp_path / "m.gguf", config, llama_state(config), block_type)
    assert convert(tmp_path / "m.gguf", tmp_path / "e", audit=False).manifest.model.dtype == dtype


@pytest.mark.parametrize(
    ("key", "value"),
    [("llama.attention.head_count", 0), ("llama.embedding_length", "x"), ("llama.embedding_length", []), ("llama.rope.freq_base", "x")],
)
def test_metadata_of_the_wrong_kind_is_a_damaged_file(tmp_path: Path, key: str, value: Any) -> None:
    source = reader(tmp_path)
    del source._meta.values["llama.attention.key_length"], source._meta.values["llama.rope.dimension_count"]
    source._meta.values[key] = value
    with pytest.raises(InputError):
        model_config_from_hf(source.config())
