"""What each family reads from config.json, against transformers' own classes: defaults, both spellings, the way back, faults."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import transformers
from tiny_models import FAMILIES as TINY
from tiny_models import make_tiny_model

from dspark.runtime.models import FAMILIES
from dspark.runtime.models.base import norm_names
from dspark.runtime.models.hf_config import hf_config_from_model, model_config_from_hf
from dspark.runtime.spec.errors import DsparkError, InputError, UnsupportedError
from dspark.runtime.spec.model_config import NO_ROPE, ModelConfig

SIZES = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 7, "num_attention_heads": 8}
NEW = ["gemma2", "gemma3_text", "phi3", "granite", "smollm3", "olmo2"]
PAIRS = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [2.0 + i for i in range(6)]}


def read(family: str, **keys: Any) -> ModelConfig:
    return model_config_from_hf({"model_type": family, **SIZES, **keys})


@pytest.mark.parametrize("family", NEW)
@pytest.mark.parametrize("keys", [{}, {"num_key_value_heads": 2, "attention_bias": True, "rms_norm_eps": 1e-3}], ids=["bare", "some"])
def test_defaults_are_those_of_transformers(family: str, keys: dict[str, Any]) -> None:
    ours, theirs = read(family, **keys), transformers.AutoConfig.for_model(family, **SIZES, **keys)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 128 // 8)
    assert (ours.max_position, ours.rms_norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert (ours.bos_token_id, ours.pad_token_id, *ours.eos_token_ids) == (theirs.bos_token_id, theirs.pad_token_id, theirs.eos_token_id)
    assert ours.qkv_bias == ours.attention_out_bias == (family != "phi3" and bool(keys.get("attention_bias")))
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * 7
    assert [ours.window_of_layer(i) for i in range(7)] == [theirs.sliding_window if k == "sliding_attention" else None for k in kinds]
    tables = theirs.rope_parameters
    for i, kind in enumerate(kinds):
        table = tables.get(kind, tables)
        rotates = getattr(theirs, "no_rope_layers", [1] * 7)[i]
        rope = ours.rope_of_layer(i)
        assert (rope.theta == table["rope_theta"] and rope.kind == table["rope_type"]) if rotates else rope == NO_ROPE


@pytest.mark.parametrize("name", TINY)
def test_the_way_back_is_the_inverse(name: str) -> None:
    """What transformers saves, read, written and read again; transformers takes what we write for the same thing."""
    saved = make_tiny_model(name).config.to_dict()
    ours = model_config_from_hf(saved)
    described = hf_config_from_model(ours)
    assert model_config_from_hf(copy.deepcopy(described)) == ours == ModelConfig.from_json(ours.to_json())
    assert model_config_from_hf(transformers.AutoConfig.for_model(**described).to_dict()) == ours


SPELLINGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # (family, transformers 4, transformers 5)
    (
        "gemma3_text",
        {
            "rope_theta": 5e5,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 3,
            "hidden_activation": None,
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
            "layer_types": [*["sliding_attention", "sliding_attention", "full_attention"] * 2, "sliding_attention"],
        },
    ),
    (
        "phi3",
        {"rope_scaling": {"type": "su", **PAIRS}, "rope_theta": 5e3, "partial_rotary_factor": 0.75, "torch_dtype": "bfloat16"},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 5e3, "partial_rotary_factor": 0.75, **PAIRS}, "dtype": "bfloat16"},
    ),
    (
        "phi3",
        {"rope_scaling": None, "sliding_window": 2047},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}} | {"sliding_window": 2047},
    ),
    (
        "granite",
        {"rope_theta": 1e7, "rope_scaling": None, "mlp_bias": None},
        {"rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}},
    ),
    (
        "smollm3",
        {"rope_theta": 5e6, "no_rope_layers": [1, 1, 1, 0, 1, 1, 1]},
        {"rope_parameters": {"rope_theta": 5e6}, "no_rope_layer_interval": 4},
    ),
    ("olmo2", {"rope_theta": 5e5, "attention_bias": None}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
    (
        "gemma2",
        {"rope_theta": 1e4, "layer_types": None, "hidden_act": "gelu_pytorch_tanh"},
        {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]},
    ),
]


@pytest.mark.parametrize(("family", "old", "new"), SPELLINGS)
def test_both_spellings_are_one_model(family: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    more = {"head_dim": 16, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    assert read(family, **more, **old) == read(family, **more, **new)


@pytest.mark.parametrize("total", [64, 65, 256])
def test_longrope_frequencies_are_those_of_transformers(total: int) -> None:
    """Both sets of factors, the share of a head that is rotated, and the temperature, at a length on each side of the first context."""
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    from dspark.runtime.layers.rope import RotaryTables

    keys = {"max_position_embeddings": 256, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75}
    keys |= {"rope_scaling": {"type": "longrope", **PAIRS}, "head_dim": 16}
    positions = torch.arange(total)
    config = transformers.Phi3Config(**SIZES, pad_token_id=0, **copy.deepcopy(keys))
    cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    ((our_cos, our_sin),) = RotaryTables(read("phi3", **keys), 256).lookup(positions, torch.full((total,), total))
    torch.testing.assert_close((our_cos, our_sin), (cos[0, :, :6], sin[0, :, :6]), rtol=0, atol=1e-6)


def test_a_model_with_a_local_rope_states_its_own_context() -> None:
    """Gemma 3's linear factor of 8 is inside its max_position_embeddings: stretched again, the context would be a million tokens."""
    keys = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "max_position_embeddings": 131072}
    assert read("gemma3_text", **keys).context_length == 131072
    assert read("gemma2", **keys).context_length == 8 * 131072


def test_norms_have_the_checkpoints_names() -> None:
    assert vars(norm_names(read("llama"))) == {
        "before_attention": "input_layernorm",
        "after_attention": None,
        "before_mlp": "post_attention_layernorm",
        "after_mlp": None,
    }
    assert norm_names(read("gemma2")).before_mlp == "pre_feedforward_layernorm"
    assert norm_names(read("olmo2")).before_attention is None


def test_a_manifest_from_before_these_families_still_loads() -> None:
    """New fields have defaults that mean what the old decoder did."""
    old = {
        "family": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "max_position": 256,
        "rope": {"theta": 10000.0, "kind": "default", "factor": 1.0, "original_max_position": None, "partial_rotary_factor": 1.0},
        "sliding_layers": [],
        "eos_token_ids": [2],
    }
    assert ModelConfig.from_json(old) == read("llama", **{**hf_sizes(old), "eos_token_id": 2}, dtype="bfloat16", bos_token_id=None)


def hf_sizes(old: dict[str, Any]) -> dict[str, Any]:
    names = {"hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "num_layers": "num_hidden_layers"}
    names |= {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "max_position": "max_position_embeddings"}
    return {theirs: old[ours] for ours, theirs in names.items()}


@pytest.mark.parametrize(
    ("family", "changes", "error", "words"),
    [
        (
            "gemma3",
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            UnsupportedError,
            "model type 'gemma3' is not supported.*gemma3_text",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, UnsupportedError, "reads both ways"),
        ("gemma2", {"hidden_activation": "gelu"}, UnsupportedError, "hidden_act 'gelu' is not supported, supported: silu"),
        ("gemma2", {"sliding_window": None}, InputError, "sliding_window is null"),
        ("gemma2", {"final_logit_softcapping": -1}, InputError, "final_logit_softcapping is -1, allowed: a positive number"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, UnsupportedError, "full_attention and sliding"),
        (
            "gemma3_text",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            UnsupportedError,
            "'dynamic' is not supported for gemma3",
        ),
        ("gemma3_text", {"layer_types": ["full_attention"]}, InputError, "layer_types has 1 entries for 7 layers"),
        (
            "phi3",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            UnsupportedError,
            "'linear' is not supported for phi3, supported: def",
        ),
        ("phi3", {"rope_scaling": {"type": "longrope", **PAIRS}}, InputError, r"needs 8 numbers.*short_factor \(6\), long_factor \(6\)"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope"}},
            InputError,
            "'longrope' needs a list of positive numbers for short_factor, long_f",
        ),
        ("phi3", {"rope_scaling": {"type": "su", **PAIRS, "long_factor": [1, "x"]}}, InputError, "allowed: a list of positive numbers"),
        ("phi3", {"partial_rotary_factor": 0.7}, InputError, "partial_rotary_factor is 0.7"),
        ("smollm3", {"no_rope_layers": [1, 0]}, InputError, "no_rope_layers has 2 entries for 7 layers"),
        ("smollm3", {"no_rope_layers": [1, 2, 0, 1, 1, 1, 1]}, InputError, "allowed: a list of 0 and 1"),
        ("olmo2", {"partial_rotary_factor": 0.5}, UnsupportedError, "partial_rotary_factor 0.5"),
    ],
)
def test_faults_are_one_sentence_with_the_value(family: str, changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read(family, **changes)


def test_an_unknown_family_is_told_all_that_are_there() -> None:
    with pytest.raises(UnsupportedError) as caught:
        read("deepseek_v3")
    assert all(name in caught.value.message and family.architecture in caught.value.message for name, family in FAMILIES.items())


ODD_VALUES = ["x", [], {}, -1, 0, 1.5, True, None, ["x"], [1, "x"], 10**30, {"full_attention": 3}]
KEYS = [
    *("hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    *("sliding_window", "sliding_window_pattern", "layer_types", "rope_local_base_freq", "rope_parameters", "rope_scaling", "rope_theta"),
    *("partial_rotary_factor", "original_max_position_embeddings", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    *("attention_multiplier", "no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "mlp_bias", "attention_bias", "head_dim"),
]


@pytest.mark.parametrize("family", NEW)
def test_no_value_of_any_key_is_a_traceback(family: str) -> None:
    """A garbled config is the file's fault and one sentence, or is read as transformers would."""
    for key in KEYS:
        for value in ODD_VALUES:
            with contextlib.suppress(DsparkError):
                read(family, **{key: value})
