"""What the keys of a `config.json` may hold. Standard library only."""

from __future__ import annotations

from typing import Any

from dspark.runtime.spec.errors import InputError, UnsupportedError

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# null counts as absent
_KINDS: dict[str, tuple[str, ...]] = {
    "a positive integer": (
        *REQUIRED,
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "sliding_window",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "no_rope_layer_interval",
        "query_pre_attn_scalar",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "decoder_sparse_step",
    ),
    "an integer from 0": ("max_window_layers", "shared_expert_intermediate_size"),
    "a positive number": (
        "rms_norm_eps",
        "rope_theta",
        "rope_local_base_freq",
        "partial_rotary_factor",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
    ),
    "a list": ("architectures", "layer_types"),
    "a list of 0 and 1": ("no_rope_layers",),
    "a list of layer numbers": ("mlp_only_layers",),
    "a list of positive numbers": ("short_factor", "long_factor"),
    "a text": ("model_type", "hidden_act", "hidden_activation", "rope_type", "type"),
    "true or false": (
        "use_sliding_window",
        "use_bidirectional_attention",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "qkv_bias",
        "norm_topk_prob",
        "truncate",
    ),
}
_LARGEST = 2**31 - 1
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}


def check_kinds(table: dict[str, Any]) -> None:
    """Raise InputError naming the first key with a value of the wrong kind."""
    for kind, keys in _KINDS.items():
        for key in keys:
            if table.get(key) is not None and not _is_kind(table[key], kind):
                raise InputError(f"config.json: {key} is {table[key]!r:.60}, allowed: {kind}", "use the checkpoint's own config.json")


def _is_kind(value: Any, kind: str) -> bool:
    if kind == "true or false":
        return isinstance(value, bool)
    if kind == "a list":
        return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    if kind == "a list of 0 and 1":
        return isinstance(value, list) and all(isinstance(entry, int) and entry in (0, 1) for entry in value)
    if kind == "a list of layer numbers":
        return isinstance(value, list) and all(isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0 for entry in value)
    if kind == "a list of positive numbers":
        return isinstance(value, list) and all(_is_kind(entry, "a positive number") for entry in value)
    if kind == "a text":
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int if "integer" in kind else (int, float)):
        return False
    return 0 < value <= _LARGEST or (value == 0 and kind == "an integer from 0")


def activation(name: str) -> str:
    """Our name of an activation. Raises UnsupportedError naming it and what is supported."""
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"hidden_act '{name}' is not supported, supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def token_id(config: dict[str, Any], key: str, default: int | None) -> int | None:
    """A token id or null. Raises InputError for anything else."""
    value = config.get(key, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise InputError(f"config.json: {key} is {value!r}, allowed: a token id")
    return value


def eos_token_ids(value: Any) -> tuple[int, ...]:
    """End-of-text ids as a tuple: from one id, a list, or nothing."""
    if value is None:
        return ()
    values = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise InputError(f"eos_token_id is {value!r}, allowed: a token id or a list of token ids")
    return tuple(dict.fromkeys(values))


def sliding_layers(config: dict[str, Any], num_layers: int) -> tuple[bool, ...] | None:
    """Which layers `layer_types` makes slide, or None without that key. Raises InputError when it has another number of layers."""
    types = config.get("layer_types")
    if types is None:
        return None
    if len(types) != num_layers:
        raise InputError(f"config.json: layer_types has {len(types)} entries for {num_layers} layers")
    return tuple(kind == "sliding_attention" for kind in types)


def layer_types(sliding: list[bool]) -> list[str]:
    """The `layer_types` key of a config."""
    return ["sliding_attention" if slides else "full_attention" for slides in sliding]
