"""Qwen3 (dense): Llama's layout with an RMS norm over each head of q and k before rope; head_dim is its own number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dspark.runtime.models.base import Family, HFConfig, attention_bias
from dspark.runtime.models.qwen2 import QWEN_DEFAULTS, read_qwen_window, write_qwen_window
from dspark.runtime.spec.model_config import ModelConfig


def _read(config: HFConfig, known: dict[str, Any]) -> dict[str, Any]:
    return {"qk_norm": True, **attention_bias(config), **read_qwen_window(config, known["num_layers"])}


def _write(model: ModelConfig) -> HFConfig:
    return {"attention_bias": model.qkv_bias, **write_qwen_window(model)}


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _read, _write, replace(QWEN_DEFAULTS, head_dim=128))
