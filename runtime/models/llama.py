"""Llama 1-3.x and the models that share its layout (SmolLM2, TinyLlama, Yi, ...). Attention and feed-forward biases follow the config."""

from __future__ import annotations

from typing import Any

from dspark.runtime.models.base import Family, HFConfig, all_biases
from dspark.runtime.spec.model_config import ModelConfig


def _read(config: HFConfig, known: dict[str, Any]) -> dict[str, Any]:
    return all_biases(config)


def _write(model: ModelConfig) -> HFConfig:
    return {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias}


LLAMA = Family("llama", "LlamaForCausalLM", _read, _write)
