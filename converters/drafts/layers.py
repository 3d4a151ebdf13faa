"""The transformer layers of a draft: their geometry, from the ordinary keys of a Hugging Face config."""

from __future__ import annotations

from typing import Any

from dspark.converters.drafts.fields import Faults, Fields
from dspark.runtime.models.hf_config import model_config_from_hf
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.model_config import ModelConfig

KINDS = {"qwen3": "qwen3", "llama": "llama", "dspark": "qwen3", "dflash": "qwen3"}
"""`model_type` -> the family whose keys it has. Layers of all of them are the same but for the norms of q and k."""

CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "qwen3": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32},
}
"""What a config that was saved as its difference from transformers' class leaves out."""

NO_TAPS = "no list of target layers (target_layer_ids): the draft cannot tell which features it reads"
_FOLLOWS_LENGTH = ("dynamic", "longrope")


def read_layers(table: dict[str, Any], faults: Faults) -> ModelConfig | None:
    """The layers that a config describes, None (and a fault) when they cannot be told or are not supported."""
    kind = table.get("model_type")
    if kind not in KINDS:
        faults.add(f"draft layers of model_type {kind!r:.40} are not supported, supported: {', '.join(KINDS)}")
        return None
    try:
        model = model_config_from_hf({**table, "model_type": KINDS[kind], "architectures": None})
    except InputError as error:
        faults.add(error.message)
        return None
    if any(model.window_of_layer(layer) is not None for layer in range(model.num_layers)):
        faults.add("draft layers with a sliding window are not supported, supported: full attention")
    if model.rope.kind in _FOLLOWS_LENGTH:
        faults.add(f"rope scaling '{model.rope.kind}' is not supported in a draft, supported: kinds that do not follow the length")
    return model


def speculators_layers(fields: Fields, kind: str) -> dict[str, Any]:
    """The layers' config of vLLM speculators with what it leaves out. kind: the method's usual model_type."""
    layers = {"model_type": kind, **fields.below("transformer_layer_config").table}
    return {**CLASS_DEFAULTS.get(str(layers["model_type"]), {}), **layers}
