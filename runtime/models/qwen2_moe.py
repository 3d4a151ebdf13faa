"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B): Qwen2's attention; mixtures of experts with a shared expert behind a sigmoid gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dspark.runtime.models.base import Family, HFConfig
from dspark.runtime.models.hf_values import layer_types, sliding_layers
from dspark.runtime.models.qwen2 import QWEN_DEFAULTS
from dspark.runtime.spec.model_config import ModelConfig


def read_qwen_experts(config: HFConfig, num_layers: int, num_experts: int, per_token: int, width: int) -> dict[str, Any]:
    """What Qwen2-MoE and Qwen3-MoE share, with the family's defaults. A layer is sparse unless `mlp_only_layers` has its number, and only
    where its number, counted from 1, is a multiple of `decoder_sparse_step`."""
    step, plain = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    sparse = tuple(layer not in plain and (layer + 1) % step == 0 for layer in range(num_layers))
    return {
        "num_experts": config.get("num_experts") or config.get("num_local_experts") or num_experts,
        "experts_per_token": config.get("num_experts_per_tok") or per_token,
        "moe_intermediate_size": config.get("moe_intermediate_size") or width,
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
        "sparse_layers": () if all(sparse) else sparse,
    }


def write_qwen_experts(model: ModelConfig) -> HFConfig:
    """The keys that `read_qwen_experts` reads."""
    return {
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.moe_intermediate_size,
        "norm_topk_prob": model.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(model.num_layers) if not model.has_experts(layer)],
    }


def _window(config: HFConfig, num_layers: int) -> dict[str, Any]:
    """Here, without `layer_types`, every other layer below `max_window_layers` slides (in Qwen2, those from there on)."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    if window is None:
        return {}
    sliding = sliding_layers(config, num_layers)
    if sliding is None:
        end = config.get("max_window_layers")
        sliding = tuple(layer % 2 == 0 and layer < (28 if end is None else end) for layer in range(num_layers))
    return {"sliding_window": window, "sliding_layers": sliding} if any(sliding) else {}


def _read(config: HFConfig, known: dict[str, Any]) -> dict[str, Any]:
    bias, shared = config.get("qkv_bias"), config.get("shared_expert_intermediate_size")
    return {
        "qkv_bias": True if bias is None else bias,
        "shared_expert_intermediate_size": 5632 if shared is None else shared,
        **read_qwen_experts(config, known["num_layers"], num_experts=60, per_token=4, width=1408),
        **_window(config, known["num_layers"]),
    }


def _write(model: ModelConfig) -> HFConfig:
    keys = {
        "qkv_bias": model.qkv_bias,
        "shared_expert_intermediate_size": model.shared_expert_intermediate_size,
        **write_qwen_experts(model),
    }
    if model.sliding_window is None:
        return keys
    kinds = layer_types([model.window_of_layer(layer) is not None for layer in range(model.num_layers)])
    return keys | {"use_sliding_window": True, "sliding_window": model.sliding_window, "layer_types": kinds}


QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", _read, _write, replace(QWEN_DEFAULTS, num_kv_heads=16))
