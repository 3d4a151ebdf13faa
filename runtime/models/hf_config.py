"""Between a Hugging Face `config.json` and ModelConfig, both ways. Standard library only.

Defaults for absent keys are those of the transformers 5 configuration classes, since that is what a checkpoint was saved against.
Both spellings are read: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters` (5), `type` and `rope_type`, `torch_dtype` and
`dtype` with or without "torch.", one end-of-text id or a list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dspark.runtime.spec.errors import InputError, UnsupportedError
from dspark.runtime.spec.model_config import DTYPES, ROPE_KINDS, ModelConfig, RopeConfig

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SILU = ("silu", "swish")
# what the keys that are read may hold; null counts as absent
_KINDS: dict[str, tuple[str, ...]] = {
    "a positive integer": (
        *_REQUIRED,
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "sliding_window",
    ),
    "an integer from 0": ("max_window_layers",),
    "a positive number": (
        "rms_norm_eps",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    ),
    "a list": ("architectures", "layer_types"),
    "a text": ("model_type", "hidden_act", "rope_type", "type"),
    "true or false": ("use_sliding_window", "tie_word_embeddings", "attention_bias", "mlp_bias", "truncate"),
}
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class _Family:
    """What the transformers configuration class of a family assumes for absent keys, and what the family derives from the rest."""

    architecture: str
    max_position: int
    num_kv_heads: int | None
    bos_token_id: int | None
    eos_token_id: int | None
    derive: Callable[[dict[str, Any], int], dict[str, Any]]
    head_dim: int | None = None


def _derive_llama(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": bool(config.get("mlp_bias", False))}


def _derive_mistral(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    return {"sliding_window": _window(config)}


def _derive_qwen2(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    return {"qkv_bias": True, **_qwen_window(config, num_layers)}


def _derive_qwen3(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qk_norm": True, "qkv_bias": bias, "attention_out_bias": bias, **_qwen_window(config, num_layers)}


_FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", 2048, None, 1, 2, _derive_llama),
    "mistral": _Family("MistralForCausalLM", 4096 * 32, 8, 1, 2, _derive_mistral),
    "qwen2": _Family("Qwen2ForCausalLM", 32768, 32, None, None, _derive_qwen2),
    "qwen3": _Family("Qwen3ForCausalLM", 32768, 32, None, None, _derive_qwen3, head_dim=128),
}
SUPPORTED_FAMILIES: tuple[str, ...] = tuple(_FAMILIES)


def _window(config: dict[str, Any]) -> int | None:
    window = config.get("sliding_window", 4096)
    return None if window is None else int(window)


def _qwen_window(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Qwen slides only where `use_sliding_window` is set and, without `layer_types`, from layer `max_window_layers` on."""
    window = _window(config) if config.get("use_sliding_window") else None
    types = config.get("layer_types")
    if window is None:
        return {}
    if types is None:
        first = config.get("max_window_layers")
        sliding = tuple(layer >= (28 if first is None else first) for layer in range(num_layers))
    else:
        if len(types) != num_layers:
            raise InputError(f"config.json: layer_types has {len(types)} entries for {num_layers} layers")
        sliding = tuple(kind == "sliding_attention" for kind in types)
    return {"sliding_window": window, "sliding_layers": sliding} if any(sliding) else {}


def model_config_from_hf(config: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Hugging Face config.

    Raises UnsupportedError for a family, activation or rope scaling that is not there (naming it and what is), InputError for a
    config that lacks or garbles what every model needs (naming every such key).
    """
    _check_kinds(config)
    name = family_of(config)
    family = _FAMILIES[name]
    missing = [key for key in _REQUIRED if config.get(key) is None]
    if missing:
        raise InputError(f"config.json lacks {', '.join(missing)}", "use the checkpoint's own config.json")
    sizes = {key: int(config[key]) for key in _REQUIRED}
    hidden, heads, layers = sizes["hidden_size"], sizes["num_attention_heads"], sizes["num_hidden_layers"]
    activation = config.get("hidden_act") or "silu"
    if activation not in _SILU:
        raise UnsupportedError(f"hidden_act '{activation}' is not supported, supported: {', '.join(_SILU)}")
    kv_heads = config.get("num_key_value_heads", family.num_kv_heads)
    head_dim = config.get("head_dim", family.head_dim) or hidden // heads
    max_position = int(config.get("max_position_embeddings") or family.max_position)
    rope = _rope(config, max_position)
    result = ModelConfig(
        family=name,
        vocab_size=sizes["vocab_size"],
        hidden_size=hidden,
        intermediate_size=sizes["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(kv_heads) if kv_heads else heads,
        head_dim=int(head_dim),
        rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        max_position=max_position,
        rope=rope,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=declared_dtype(config) or "float32",
        bos_token_id=_token_id(config, "bos_token_id", family.bos_token_id),
        eos_token_ids=eos_token_ids(config.get("eos_token_id", family.eos_token_id)),
        pad_token_id=_token_id(config, "pad_token_id", None),
        **family.derive(config, layers),
    )
    if result.num_heads % result.num_kv_heads:
        raise InputError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {result.num_kv_heads}")
    if result.head_dim % 2:
        raise InputError(f"config.json: head_dim is {result.head_dim}, rotary embeddings need an even number")
    return result


def family_of(config: dict[str, Any]) -> str:
    """Key of the family table. Raises UnsupportedError naming the model type or architecture and what is supported."""
    supported = f"supported: {', '.join(f'{name} ({family.architecture})' for name, family in _FAMILIES.items())}"
    architectures = config.get("architectures") or []
    by_architecture = {family.architecture: name for name, family in _FAMILIES.items()}
    model_type = config.get("model_type") or (by_architecture.get(architectures[0]) if architectures else None)
    if model_type not in _FAMILIES:
        what = f"model type '{model_type}'" if model_type else f"architecture {architectures or 'unknown'}"
        raise UnsupportedError(f"{what} is not supported, {supported}")
    if architectures and architectures[0] != _FAMILIES[model_type].architecture:
        raise UnsupportedError(f"architecture '{architectures[0]}' is not supported, {supported}")
    return str(model_type)


def declared_dtype(config: dict[str, Any]) -> str | None:
    """The dtype a config declares ("bfloat16"), or None. Raises UnsupportedError for one that weights cannot have."""
    value = config.get("dtype") or config.get("torch_dtype")
    if value is None or value == "auto":
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedError(f"config.json declares dtype '{value}', supported: {', '.join(DTYPES)}", "choose one with --dtype")
    return name


def eos_token_ids(value: Any) -> tuple[int, ...]:
    """End-of-text ids as a tuple: from one id, a list, or nothing."""
    if value is None:
        return ()
    values = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise InputError(f"eos_token_id is {value!r}, allowed: a token id or a list of token ids")
    return tuple(dict.fromkeys(values))


def _rope(config: dict[str, Any], max_position: int) -> RopeConfig:
    """Rope settings, with the precedence of transformers: `rope_scaling`, else `rope_parameters`; a theta inside wins."""
    table = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
        raise UnsupportedError(f"rope settings per layer type are not supported ({table!r:.80})", "supported: one table for all layers")
    _check_kinds(table)
    kind = table.get("rope_type") or table.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedError(f"rope scaling '{kind}' is not supported, supported: {', '.join(ROPE_KINDS)}")
    partial = table.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedError(f"partial_rotary_factor {partial} is not supported, supported: 1.0")
    theta = table.get("rope_theta") or config.get("rope_theta") or 10000.0
    original = config.get("original_max_position_embeddings") or table.get("original_max_position_embeddings") or max_position
    if kind == "default":
        return RopeConfig(theta=float(theta))
    if kind == "yarn" and table.get("factor") is None:
        table = {**table, "factor": max_position / original}
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    bad = [key for key in needed if table.get(key) is None]
    if bad:
        raise InputError(f"config.json: rope scaling '{kind}' needs a positive number for {', '.join(bad)}")
    values: dict[str, Any] = {"theta": float(theta), "kind": kind, "factor": float(table["factor"])}
    if kind == "dynamic":  # transformers takes the configured context as the original one here, whatever the table says
        values["original_max_position"] = max_position
    if kind in ("llama3", "yarn"):
        values["original_max_position"] = int(original)
    if kind == "llama3":
        values |= {key: float(table[key]) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        optional = {key: table[key] for key in ("attention_factor", "mscale", "mscale_all_dim") if table.get(key) is not None}
        values |= {key: float(value) for key, value in optional.items()}
        values |= {"beta_fast": float(table.get("beta_fast") or 32), "beta_slow": float(table.get("beta_slow") or 1)}
        values["truncate"] = bool(table.get("truncate", True))
    return RopeConfig(**values)


def _check_kinds(table: dict[str, Any]) -> None:
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
    if kind == "a text":
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int if "integer" in kind else (int, float)):
        return False
    return 0 < value <= _LARGEST or (value == 0 and kind == "an integer from 0")


def _token_id(config: dict[str, Any], key: str, default: int | None) -> int | None:
    value = config.get(key, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise InputError(f"config.json: {key} is {value!r}, allowed: a token id")
    return value


def hf_config_from_model(model: ModelConfig) -> dict[str, Any]:
    """A config.json for transformers that computes what ModelConfig says; `model_config_from_hf` is its inverse.

    Raises UnsupportedError when no transformers class of the family computes it (a mix of biases that none has).
    """
    family = _FAMILIES[model.family]
    rope = model.rope
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": model.family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": model.hidden_act,
        "rms_norm_eps": model.rms_norm_eps,
        "max_position_embeddings": model.max_position,
        "rope_theta": rope.theta,
        "rope_scaling": _rope_table(rope),
        "tie_word_embeddings": model.tie_word_embeddings,
        "torch_dtype": model.dtype,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": _one_or_list(model.eos_token_ids),
        "pad_token_id": model.pad_token_id,
    }
    if model.family in ("llama", "qwen3"):
        config["attention_bias"] = model.qkv_bias
    if model.family == "llama":
        config["mlp_bias"] = model.mlp_bias
    if model.family == "mistral":
        config["sliding_window"] = model.sliding_window
    if model.family in ("qwen2", "qwen3") and model.sliding_window is not None:
        kinds = ["sliding_attention" if model.window_of_layer(layer) else "full_attention" for layer in range(model.num_layers)]
        config |= {"use_sliding_window": True, "sliding_window": model.sliding_window, "layer_types": kinds}
    computed = family.derive(config, model.num_layers)
    lost = [key for key in ("qkv_bias", "attention_out_bias", "mlp_bias", "qk_norm") if getattr(model, key) != computed.get(key, False)]
    if lost:
        shown = ", ".join(f"{key}={getattr(model, key)}" for key in lost)
        raise UnsupportedError(f"no transformers class of family '{model.family}' has {shown}")
    return config


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    if len(ids) > 1:
        return list(ids)
    return ids[0] if ids else None


def _rope_table(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    table: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        table["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        table |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        table |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        optional = {key: getattr(rope, key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
        table |= {key: value for key, value in optional.items() if value is not None}
    return table
