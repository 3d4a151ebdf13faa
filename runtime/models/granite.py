"""Granite 3 (dense): Llama's layout with factors on the embedding, the residual branches and the attention scores, and divided logits."""

from __future__ import annotations

from typing import Any

from dspark.runtime.models.base import Family, HFConfig, all_biases
from dspark.runtime.spec.model_config import ModelConfig

_KEYS = {  # key of config.json -> field; all of them are 1 where absent, the attention scale too
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "attention_multiplier": "attention_scale",
    "logits_scaling": "logits_divisor",
}


def _read(config: HFConfig, known: dict[str, Any]) -> dict[str, Any]:
    return {**all_biases(config), **{name: float(config.get(key) or 1.0) for key, name in _KEYS.items()}}


def _write(model: ModelConfig) -> HFConfig:
    keys: HFConfig = {key: getattr(model, name) for key, name in _KEYS.items()}
    return {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias, **keys}


GRANITE = Family("granite", "GraniteForCausalLM", _read, _write)
