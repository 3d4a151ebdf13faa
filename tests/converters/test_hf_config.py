"""ModelConfig from config.json, against what transformers' own configuration and rotary classes make of the same file."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import transformers
from case_checkpoints import ROPE_SPELLINGS, llama_config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dspark.runtime.models.hf_config import declared_dtype, hf_config_from_model, model_config_from_hf
from dspark.runtime.spec.errors import DsparkError, InputError, UnsupportedError

SIZES = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
CLASSES = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}

# (family, keys beside SIZES): absent keys take the family's own defaults, which differ
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 2, "head_dim": 32, "eos_token_id": [2, 7], "bos_token_id": None}),
    ("llama", {"num_key_value_heads": None, "head_dim": None, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {}),
    ("mistral", {"sliding_window": None, "num_key_value_heads": 8}),
    ("mistral", {"sliding_window": 64, "num_key_value_heads": 4}),
    ("qwen2", {"num_key_value_heads": 2}),
    ("qwen2", {"num_key_value_heads": 2, "sliding_window": 64, "use_sliding_window": False}),
    ("qwen2", {"num_key_value_heads": 2, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}),
    ("qwen2", {"num_key_value_heads": 2, "sliding_window": 64, "use_sliding_window": True}),
    (
        "qwen3",
        {
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        },
    ),
    ("qwen3", {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("family", "keys"), CONFIGS)
def test_defaults_are_those_of_transformers(family: str, keys: dict[str, Any]) -> None:
    raw = {"model_type": family, **SIZES, **keys}
    ours = model_config_from_hf(copy.deepcopy(raw))
    theirs = getattr(transformers, CLASSES[family])(**{k: v for k, v in copy.deepcopy(raw).items() if k != "model_type"})
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 128 // 8)
    assert (ours.max_position, ours.rms_norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert (ours.bos_token_id, ours.pad_token_id) == (theirs.bos_token_id, theirs.pad_token_id)
    eos = theirs.eos_token_id
    assert ours.eos_token_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
    assert ours.qkv_bias == (family == "qwen2" or getattr(theirs, "attention_bias", False))
    assert ours.attention_out_bias == (family != "qwen2" and getattr(theirs, "attention_bias", False))
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    if family == "mistral":
        assert [ours.window_of_layer(i) for i in range(4)] == [theirs.sliding_window] * 4
    if family.startswith("qwen"):
        wanted = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
        assert [ours.window_of_layer(i) for i in range(4)] == wanted


@pytest.mark.parametrize(("family", "keys"), CONFIGS)
def test_the_way_back_is_the_inverse(family: str, keys: dict[str, Any]) -> None:
    ours = model_config_from_hf({"model_type": family, **SIZES, **keys})
    assert model_config_from_hf(hf_config_from_model(ours)) == ours


MORE_ROPE: dict[str, dict[str, Any]] = {
    "yarn_without_original": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "yarn_all_keys": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16,
            "beta_slow": 2,
            "attention_factor": 1.25,
            "truncate": False,
        }
    },
    "yarn_mscale": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        }
    },
    "original_beside_the_table": {
        "original_max_position_embeddings": 32,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    },
    "dynamic_with_an_original": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}},
    "both_tables": {
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "empty_table": {"rope_scaling": {}, "rope_theta": 777.0},
}


@pytest.mark.parametrize("name", [*ROPE_SPELLINGS, *MORE_ROPE])
def test_frequencies_are_those_of_the_original_file(name: str) -> None:
    """The file itself and our reading of it, both through transformers' rotary embedding: equal at every position and length."""
    raw = llama_config(**(ROPE_SPELLINGS[name][0] if name in ROPE_SPELLINGS else MORE_ROPE[name]))
    described = hf_config_from_model(model_config_from_hf(copy.deepcopy(raw)))
    states = torch.zeros(1, 1, 32)
    for length in (8, 64, 256):
        positions = torch.arange(length)[None]
        original = LlamaRotaryEmbedding(transformers.LlamaConfig(**copy.deepcopy(raw)))(states, positions)
        ours = LlamaRotaryEmbedding(transformers.LlamaConfig(**copy.deepcopy(described)))(states, positions)
        assert torch.equal(original[0], ours[0]) and torch.equal(original[1], ours[1])


def test_dynamic_scaling_opens_the_context_it_is_for() -> None:
    model = model_config_from_hf(llama_config(rope_scaling={"type": "dynamic", "factor": 4.0}, max_position_embeddings=64))
    assert (model.max_position, model.context_length, model.rope.original_max_position) == (64, 256, 64)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
            UnsupportedError,
            "'deepseek_v3' is not supported, supported: llama",
        ),
        ({"model_type": None, "architectures": []}, UnsupportedError, "architecture unknown"),
        ({"hidden_act": "gelu"}, UnsupportedError, "'gelu' is not supported, supported: silu, swish, gelu_pytorch_tanh"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, UnsupportedError, "'su' is not supported, supported: default, linear, dynamic"),
        ({"rope_scaling": {"type": "linear"}}, InputError, "'linear' needs a positive number for factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, InputError, "low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, UnsupportedError, "per layer type"),
        ({"partial_rotary_factor": 0.5}, UnsupportedError, "partial_rotary_factor 0.5"),
        ({"hidden_size": None, "vocab_size": None}, InputError, "lacks vocab_size, hidden_size"),
        ({"num_attention_heads": "4"}, InputError, "num_attention_heads is '4', allowed: a positive integer"),
        ({"num_key_value_heads": 3}, InputError, "no multiple of num_key_value_heads 3"),
        ({"head_dim": 33}, InputError, "head_dim is 33"),
        ({"eos_token_id": "</s>"}, InputError, "eos_token_id is '</s>'"),
        ({"torch_dtype": "float8_e4m3fn"}, UnsupportedError, "dtype 'float8_e4m3fn'"),
    ],
)
def test_faults_are_one_sentence_with_the_value(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        model_config_from_hf(llama_config(**changes))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"torch_dtype": None}, None),
        ({"torch_dtype": "auto"}, None),
        ({}, None),
    ],
)
def test_declared_dtype(keys: dict[str, Any], expected: str | None) -> None:
    assert declared_dtype(keys) == expected


def test_architecture_alone_names_the_family() -> None:
    raw = llama_config(architectures=["Qwen2ForCausalLM"])
    del raw["model_type"]
    assert model_config_from_hf(raw).family == "qwen2"


ODD_VALUES = ["x", [], {}, -1, 0, 1.5, True, None, ["x"], [1, "x"], 10**30]
KEYS = [
    *("vocab_size", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "sliding_window", "max_window_layers"),
    *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings", "architectures", "model_type", "eos_token_id"),
    *("bos_token_id", "torch_dtype", "layer_types", "use_sliding_window", "hidden_act", "tie_word_embeddings", "attention_bias"),
]
TABLE_KEYS = ["rope_type", "type", "factor", "original_max_position_embeddings", "beta_fast", "attention_factor", "mscale", "rope_theta"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("family", list(CLASSES))
def test_no_value_of_any_key_is_a_traceback(family: str, key: str) -> None:
    """A garbled config is the file's fault and one sentence, or is read as transformers would."""
    for value in ODD_VALUES:
        raw = llama_config(model_type=family, architectures=None, use_sliding_window=True) | {key: value}
        with contextlib.suppress(DsparkError):
            model_config_from_hf(raw)


@pytest.mark.parametrize("key", TABLE_KEYS)
def test_no_value_in_a_rope_table_is_a_traceback(key: str) -> None:
    for value in ODD_VALUES:
        for kind in ("yarn", "llama3", "linear", "dynamic"):
            with contextlib.suppress(DsparkError):
                model_config_from_hf(llama_config(rope_scaling={"rope_type": kind, "factor": 2.0, key: value}))
