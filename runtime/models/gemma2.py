"""Gemma 2: norms around both blocks that multiply by 1 + weight, GeGLU, capped scores and logits, a window in every other layer, and
embedding rows multiplied by the root of the hidden size (rounded to the weights' dtype)."""

from __future__ import annotations

from typing import Any

from dspark.runtime.models.base import Defaults, Family, HFConfig, attention_bias
from dspark.runtime.models.hf_values import activation, layer_types, sliding_layers
from dspark.runtime.spec.errors import InputError, UnsupportedError
from dspark.runtime.spec.model_config import ModelConfig


def read_gemma(config: HFConfig, known: dict[str, Any], full_every: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share. full_every: without `layer_types`, every so manieth layer has full attention and the others slide."""
    if config.get("use_bidirectional_attention"):
        raise UnsupportedError("use_bidirectional_attention is true: a model that reads both ways generates no text", "supported: false")
    num_layers = known["num_layers"]
    sliding = sliding_layers(config, num_layers)
    if sliding is None:
        sliding = tuple((layer + 1) % full_every != 0 for layer in range(num_layers))
    window = config.get("sliding_window", 4096)
    if any(sliding) and window is None:
        raise InputError(
            "config.json: sliding_window is null, but layer_types has sliding_attention", "use the checkpoint's own config.json"
        )
    return {
        **attention_bias(config),
        "hidden_act": activation(config.get("hidden_activation") or "gelu_pytorch_tanh"),
        "post_norms": True,
        "norm_offset": True,
        "attention_scale": float((config.get("query_pre_attn_scalar") or 256) ** -0.5),
        "embedding_multiplier": float(known["hidden_size"] ** 0.5),
        "round_embedding_multiplier": True,
        **({"sliding_window": window, "sliding_layers": sliding} if any(sliding) else {}),
    }


def write_gemma(model: ModelConfig) -> HFConfig:
    """The keys that `read_gemma` reads."""
    scale = model.head_dim**-0.5 if model.attention_scale is None else model.attention_scale
    return {
        "attention_bias": model.qkv_bias,
        "hidden_activation": model.hidden_act,
        "query_pre_attn_scalar": round(scale**-2),
        "sliding_window": model.sliding_window,
        "layer_types": layer_types([model.window_of_layer(layer) is not None for layer in range(model.num_layers)]),
        "final_logit_softcapping": model.logits_softcap,
    }


def _read(config: HFConfig, known: dict[str, Any]) -> dict[str, Any]:
    caps = {"attention_softcap": config.get("attn_logit_softcapping", 50.0), "logits_softcap": config.get("final_logit_softcapping", 30.0)}
    return {**read_gemma(config, known, full_every=2), **caps}


def _write(model: ModelConfig) -> HFConfig:
    return {**write_gemma(model), "attn_logit_softcapping": model.attention_softcap}


GEMMA_DEFAULTS = Defaults(
    max_position=8192, num_kv_heads=4, head_dim=256, tie_word_embeddings=True, bos_token_id=2, eos_token_id=1, pad_token_id=0
)
GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", _read, _write, GEMMA_DEFAULTS)
