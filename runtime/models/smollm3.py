"""SmolLM3: Llama's layout in which every fourth layer has no position embedding (NoPE); those layers may slide."""

from __future__ import annotations

from typing import Any

from dspark.runtime.models.base import Defaults, Family, HFConfig, all_biases
from dspark.runtime.models.hf_values import layer_types, sliding_layers
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.model_config import ModelConfig


def _read(config: HFConfig, known: dict[str, Any]) -> dict[str, Any]:
    num_layers = known["num_layers"]
    listed = config.get("no_rope_layers")  # 1 where a layer does rotate, whatever the name says
    if listed is None:
        interval = config.get("no_rope_layer_interval") or 4
        rotates = tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    elif len(listed) < num_layers:
        raise InputError(f"config.json: no_rope_layers has {len(listed)} entries for {num_layers} layers")
    else:
        rotates = tuple(bool(entry) for entry in listed[:num_layers])
    fields = {**all_biases(config), "rope_layers": () if all(rotates) else rotates}
    window, sliding = config.get("sliding_window"), sliding_layers(config, num_layers)
    if sliding is None:
        sliding = tuple(bool(config.get("use_sliding_window")) and not entry for entry in rotates)
    if window is not None and any(sliding):
        fields |= {"sliding_window": window, "sliding_layers": sliding}
    return fields


def _write(model: ModelConfig) -> HFConfig:
    layers = range(model.num_layers)
    return {
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
        "no_rope_layers": [int(not model.rope_layers or model.rope_layers[layer]) for layer in layers],
        "use_sliding_window": model.sliding_window is not None,
        "sliding_window": model.sliding_window,
        "layer_types": layer_types([model.window_of_layer(layer) is not None for layer in layers]),
    }


_DEFAULTS = Defaults(
    max_position=32768,
    num_kv_heads=4,
    rope_theta=2000000.0,
    tie_word_embeddings=True,
    bos_token_id=128000,
    eos_token_id=128001,
    pad_token_id=128004,
)
SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", _read, _write, _DEFAULTS)
