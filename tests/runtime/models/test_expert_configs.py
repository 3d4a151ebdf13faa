"""What the families with experts read from config.json, against transformers' own classes: defaults, which layers, spellings, faults."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import transformers

from dspark.runtime.models import FAMILIES
from dspark.runtime.models.hf_config import hf_config_from_model, model_config_from_hf
from dspark.runtime.spec.errors import DsparkError, InputError
from dspark.runtime.spec.model_config import ModelConfig

SIZES = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 5, "num_attention_heads": 8}
SPARSE = ["mixtral", "qwen2_moe", "qwen3_moe"]


def read(family: str, **keys: Any) -> ModelConfig:
    return model_config_from_hf({"model_type": family, **SIZES, **keys})


def theirs(family: str, **keys: Any) -> Any:
    return transformers.AutoConfig.for_model(family, **SIZES, **keys)


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("keys", [{}, {"num_key_value_heads": 2, "num_experts_per_tok": 3, "rms_norm_eps": 1e-3}], ids=["bare", "some"])
def test_defaults_are_those_of_transformers(family: str, keys: dict[str, Any]) -> None:
    if family == "qwen2_moe" and not keys:
        keys = {"num_key_value_heads": 8}  # its default of 16 does not divide these heads
    ours, want = read(family, **keys), theirs(family, **keys)
    assert (ours.num_experts, ours.experts_per_token) == (want.num_experts, want.num_experts_per_tok)
    assert ours.moe_intermediate_size == getattr(want, "moe_intermediate_size", want.intermediate_size)
    assert ours.shared_expert_intermediate_size == getattr(want, "shared_expert_intermediate_size", 0)
    assert ours.norm_topk_prob == getattr(want, "norm_topk_prob", True)
    assert (ours.num_kv_heads, ours.rms_norm_eps, ours.max_position) == (
        want.num_key_value_heads,
        want.rms_norm_eps,
        want.max_position_embeddings,
    )
    assert ours.rope.theta == want.rope_parameters["rope_theta"] and ours.tie_word_embeddings == want.tie_word_embeddings
    assert (ours.bos_token_id, ours.pad_token_id) == (want.bos_token_id, want.pad_token_id)
    assert ours.qkv_bias == (family == "qwen2_moe") and not ours.attention_out_bias and ours.qk_norm == (family == "qwen3_moe")
    assert ours.sliding_window is None and all(ours.has_experts(layer) for layer in range(5))


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(
    ("keys", "sparse"),
    [
        ({"decoder_sparse_step": 2}, [False, True, False, True, False]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, [False, False, False, True, False]),
        ({"mlp_only_layers": [0, 4]}, [False, True, True, True, False]),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, [True] * 5),
        ({"decoder_sparse_step": 9}, [False] * 5),
    ],
)
def test_sparse_layers_are_those_that_transformers_builds(family: str, keys: dict[str, Any], sparse: list[bool]) -> None:
    more = {"num_key_value_heads": 8, "num_experts": 4, "num_experts_per_tok": 2}
    ours = read(family, **more, **keys)
    assert [ours.has_experts(layer) for layer in range(5)] == sparse
    described = transformers.AutoConfig.for_model(**hf_config_from_model(ours))
    with torch.device("meta"):
        layers = getattr(transformers, FAMILIES[family].architecture)(described).model.layers
    assert [hasattr(layer.mlp, "experts") for layer in layers] == sparse
    assert model_config_from_hf(hf_config_from_model(ours)) == ours == ModelConfig.from_json(ours.to_json())


def test_both_spellings_of_the_number_of_experts_are_read() -> None:
    assert read("qwen3_moe", num_experts=16) == read("qwen3_moe", num_local_experts=16)
    assert read("mixtral", num_local_experts=4) == read("mixtral", num_experts=4)


def test_a_window_that_is_switched_off_may_be_zero() -> None:
    """transformers 5 saves Qwen2-MoE so; a window of 0 that counts would let a token see nothing."""
    keys = {"num_key_value_heads": 8, "sliding_window": 0}
    assert read("qwen2_moe", **keys, use_sliding_window=False).sliding_window is None
    for family, more in (("qwen2_moe", {"use_sliding_window": True}), ("mixtral", {}), ("mistral", {})):
        with pytest.raises(InputError, match="sliding_window is 0, allowed: a positive integer"):
            read(family, **keys, **more)


def test_windows_are_where_transformers_has_them() -> None:
    """Qwen2-MoE: every other layer below max_window_layers; Qwen3-MoE: every layer."""
    keys = {"num_key_value_heads": 8, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}
    ours, want = read("qwen2_moe", **keys), theirs("qwen2_moe", **keys)
    assert [ours.window_of_layer(i) for i in range(5)] == [32 if kind == "sliding_attention" else None for kind in want.layer_types]
    assert [ours.window_of_layer(i) for i in range(5)] == [32, None, 32, None, None]
    assert [read("qwen3_moe", **keys).window_of_layer(i) for i in range(5)] == [32] * 5


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0, allowed: a positive integer"),
        ("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok is 3, the model has 2 experts"),
        ("qwen3_moe", {"mlp_only_layers": [1, "2"]}, "allowed: a list of layer numbers"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1, allowed: true or false"),
        ("qwen2_moe", {"shared_expert_intermediate_size": -1}, "allowed: an integer from 0"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, allowed: a positive integer"),
    ],
)
def test_faults_are_one_sentence_with_the_value(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(family, num_key_value_heads=8, **changes)


ODD_VALUES = ["x", [], {}, -1, 0, 1.5, True, None, ["x"], [1, "x"], [99], 10**30]
KEYS = ["num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"]
KEYS += ["norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "qkv_bias", "use_sliding_window", "sliding_window", "layer_types"]


@pytest.mark.parametrize("family", SPARSE)
def test_no_value_of_any_key_is_a_traceback(family: str) -> None:
    for key in KEYS:
        for value in ODD_VALUES:
            with contextlib.suppress(DsparkError):
                read(family, num_key_value_heads=8, **{key: value})
