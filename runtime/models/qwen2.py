"""Qwen2 and Qwen2.5: Llama's layout with biases on q, k and v; a sliding window only where the config switches it on."""

from __future__ import annotations

from typing import Any

from dspark.runtime.models.base import Defaults, Family, HFConfig
from dspark.runtime.models.hf_values import layer_types, sliding_layers
from dspark.runtime.spec.model_config import ModelConfig


def read_qwen_window(config: HFConfig, num_layers: int) -> dict[str, Any]:
    """Qwen slides only where `use_sliding_window` is set and, without `layer_types`, from layer `max_window_layers` on."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    if window is None:
        return {}
    sliding = sliding_layers(config, num_layers)
    if sliding is None:
        first = config.get("max_window_layers")
        sliding = tuple(layer >= (28 if first is None else first) for layer in range(num_layers))
    return {"sliding_window": window, "sliding_layers": sliding} if any(sliding) else {}


def write_qwen_window(model: ModelConfig) -> HFConfig:
    """The keys that `read_qwen_window` reads."""
    if model.sliding_window is None:
        return {}
    kinds = layer_types([model.window_of_layer(layer) is not None for layer in range(model.num_layers)])
    return {"use_sliding_window": True, "sliding_window": model.sliding_window, "layer_types": kinds}


def _read(config: HFConfig, known: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, **read_qwen_window(config, known["num_layers"])}


QWEN_DEFAULTS = Defaults(max_position=32768, num_kv_heads=32, bos_token_id=None, eos_token_id=None)
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _read, write_qwen_window, QWEN_DEFAULTS)
