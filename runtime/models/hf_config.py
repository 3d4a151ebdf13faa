"""Between a Hugging Face `config.json` and ModelConfig, both ways. Standard library only.

Defaults for absent keys are those of the transformers 5 configuration classes, since that is what a checkpoint was saved against; they and
the keys that only one family has stand in the family's own file. Both spellings are read: `rope_theta` + `rope_scaling` (transformers 4)
and `rope_parameters` (5), `type` and `rope_type`, `torch_dtype` and `dtype` with or without "torch.", one end-of-text id or a list.
"""

from __future__ import annotations

from typing import Any

from dspark.runtime.models import FAMILIES
from dspark.runtime.models.hf_rope import check_rope, read_rope, write_rope
from dspark.runtime.models.hf_values import REQUIRED, activation, check_kinds, eos_token_ids, token_id
from dspark.runtime.spec.errors import InputError, UnsupportedError
from dspark.runtime.spec.model_config import DTYPES, ModelConfig

__all__ = ["declared_dtype", "eos_token_ids", "family_of", "hf_config_from_model", "model_config_from_hf"]

# what a family's transformers class must compute as ModelConfig says, or the way back is refused
_FLAGS = ("qkv_bias", "attention_out_bias", "mlp_bias", "qk_norm", "full_width_qk_norm", "pre_norms", "post_norms", "norm_offset")


def model_config_from_hf(config: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Hugging Face config.

    Raises UnsupportedError for a family, activation or rope scaling that is not there (naming it and what is), InputError for a
    config that lacks or garbles what every model needs (naming every such key).
    """
    config = _without_idle_window(config)
    check_kinds(config)
    family = FAMILIES[family_of(config)]
    defaults = family.defaults
    missing = [key for key in REQUIRED if config.get(key) is None]
    if missing:
        raise InputError(f"config.json lacks {', '.join(missing)}", "use the checkpoint's own config.json")
    sizes = {key: int(config[key]) for key in REQUIRED}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    tied = config.get("tie_word_embeddings")
    kv_heads = config.get("num_key_value_heads", defaults.num_kv_heads)
    values: dict[str, Any] = {
        "family": family.name,
        "vocab_size": sizes["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": sizes["intermediate_size"],
        "num_layers": sizes["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": int(kv_heads) if kv_heads else heads,
        "head_dim": int(config.get("head_dim", defaults.head_dim) or hidden // heads),
        "rms_norm_eps": float(config.get("rms_norm_eps") or defaults.rms_norm_eps),
        "max_position": int(config.get("max_position_embeddings") or defaults.max_position),
        "tie_word_embeddings": defaults.tie_word_embeddings if tied is None else bool(tied),
        "dtype": declared_dtype(config) or "float32",
        "bos_token_id": token_id(config, "bos_token_id", defaults.bos_token_id),
        "eos_token_ids": eos_token_ids(config.get("eos_token_id", defaults.eos_token_id)),
        "pad_token_id": token_id(config, "pad_token_id", defaults.pad_token_id),
    }
    values |= family.read(config, values)
    if "hidden_act" not in values:
        values["hidden_act"] = activation(config.get("hidden_act") or "silu")
    if "rope" not in values:
        values["rope"] = read_rope(config, values["max_position"], defaults.rope_theta)
    result = ModelConfig(**values)
    if result.num_heads % result.num_kv_heads:
        raise InputError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {result.num_kv_heads}")
    if result.head_dim % 2:
        raise InputError(f"config.json: head_dim is {result.head_dim}, rotary embeddings need an even number")
    if result.experts_per_token > result.num_experts:
        raise InputError(f"config.json: num_experts_per_tok is {result.experts_per_token}, the model has {result.num_experts} experts")
    for rope in result.ropes():
        check_rope(rope, result.head_dim)
    return result


def _without_idle_window(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes sliding_window 0 for a Qwen2-MoE whose window is switched off; elsewhere 0 is a fault."""
    idle = config.get("use_sliding_window") is False and config.get("sliding_window") == 0
    return {**config, "sliding_window": None} if idle else config


def family_of(config: dict[str, Any]) -> str:
    """Key of the family table. Raises UnsupportedError naming the model type or architecture and what is supported."""
    supported = f"supported: {', '.join(f'{name} ({family.architecture})' for name, family in FAMILIES.items())}"
    architectures = config.get("architectures") or []
    by_architecture = {family.architecture: name for name, family in FAMILIES.items()}
    model_type = config.get("model_type") or (by_architecture.get(architectures[0]) if architectures else None)
    if model_type not in FAMILIES:
        what = f"model type '{model_type}'" if model_type else f"architecture {architectures or 'unknown'}"
        raise UnsupportedError(f"{what} is not supported, {supported}")
    if architectures and architectures[0] != FAMILIES[model_type].architecture:
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


def hf_config_from_model(model: ModelConfig) -> dict[str, Any]:
    """A config.json for transformers that computes what ModelConfig says; `model_config_from_hf` is its inverse.

    Raises UnsupportedError when no transformers class of the family computes it (a mix of biases that none has).
    """
    family = FAMILIES[model.family]
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
        "tie_word_embeddings": model.tie_word_embeddings,
        "torch_dtype": model.dtype,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": _one_or_list(model.eos_token_ids),
        "pad_token_id": model.pad_token_id,
    }
    config |= family.write(model)
    if "rope_parameters" not in config:
        config |= write_rope(model)
    computed = model_config_from_hf(config)
    lost = [name for name in _FLAGS if getattr(model, name) != getattr(computed, name)]
    if lost:
        shown = ", ".join(f"{name}={getattr(model, name)}" for name in lost)
        raise UnsupportedError(f"no transformers class of family '{model.family}' has {shown}")
    return config


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    if len(ids) > 1:
        return list(ids)
    return ids[0] if ids else None
