"""Qwen3-MoE: Qwen3's attention with mixtures of experts and no shared one; a window, where it is switched on, holds for every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dspark.runtime.models.base import Family, HFConfig, attention_bias
from dspark.runtime.models.qwen2 import QWEN_DEFAULTS
from dspark.runtime.models.qwen2_moe import read_qwen_experts, write_qwen_experts
from dspark.runtime.spec.model_config import ModelConfig


def _read(config: HFConfig, known: dict[str, Any]) -> dict[str, Any]:
    return {
        "qk_norm": True,
        **attention_bias(config),
        **read_qwen_experts(config, known["num_layers"], num_experts=128, per_token=8, width=768),
        "sliding_window": config.get("sliding_window", 4096) if config.get("use_sliding_window") else None,
    }


def _write(model: ModelConfig) -> HFConfig:
    window = {"use_sliding_window": model.sliding_window is not None, "sliding_window": model.sliding_window}
    return {"attention_bias": model.qkv_bias, **write_qwen_experts(model), **window}


QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", _read, _write, replace(QWEN_DEFAULTS, num_kv_heads=4))
