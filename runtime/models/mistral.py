"""Mistral: Llama's layout with sliding-window attention in every layer (a null window is full attention)."""

from __future__ import annotations

from typing import Any

from dspark.runtime.models.base import Defaults, Family, HFConfig
from dspark.runtime.spec.model_config import ModelConfig


def _read(config: HFConfig, known: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": config.get("sliding_window", 4096)}


def _write(model: ModelConfig) -> HFConfig:
    return {"sliding_window": model.sliding_window}


MISTRAL = Family("mistral", "MistralForCausalLM", _read, _write, Defaults(max_position=4096 * 32, num_kv_heads=8))
