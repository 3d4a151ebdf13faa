"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama's layout in fused projections, with longrope and partly rotated heads."""

from __future__ import annotations

from typing import Any

from dspark.runtime.models.base import Defaults, Family, HFConfig
from dspark.runtime.models.hf_rope import read_rope_table, write_rope
from dspark.runtime.models.hf_values import check_kinds
from dspark.runtime.spec.errors import InputError, UnsupportedError
from dspark.runtime.spec.model_config import ModelConfig, RopeConfig

_ORIGINAL = 4096
_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}  # older names of the same thing


def _read_rope(config: HFConfig, max_position: int, head_dim: int) -> RopeConfig:
    """Here the config's own `original_max_position_embeddings` counts, not the table's."""
    table = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(table, dict):
        raise InputError(f"config.json: rope_scaling is {table!r:.60}, allowed: a table or null")
    check_kinds(table)
    kind = table.get("rope_type") or table.get("type") or "default"
    if kind not in _KINDS:
        raise UnsupportedError(f"rope scaling '{kind}' is not supported for phi3, supported: {', '.join(_KINDS)}")
    original = int(config.get("original_max_position_embeddings") or _ORIGINAL)
    theta = float(table.get("rope_theta") or config.get("rope_theta") or 10000.0)
    rope = read_rope_table({**table, "rope_type": _KINDS[kind]}, max_position, original, theta)
    partial = float(table.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if partial > 1 or int(head_dim * partial) % 2:
        raise InputError(f"config.json: partial_rotary_factor is {partial:g}, allowed: up to 1, an even share of {head_dim} dimensions")
    return RopeConfig(**{**vars(rope), "partial_rotary_factor": partial})


def _read(config: HFConfig, known: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": config.get("sliding_window"), "rope": _read_rope(config, known["max_position"], known["head_dim"])}


def _write(model: ModelConfig) -> HFConfig:
    keys = {"sliding_window": model.sliding_window, **write_rope(model)}
    return keys | {"original_max_position_embeddings": model.rope.original_max_position or _ORIGINAL}


_DEFAULTS = Defaults(max_position=4096, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=32000, pad_token_id=32000)
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
PHI3 = Family("phi3", "Phi3ForCausalLM", _read, _write, _DEFAULTS, fused=_FUSED)
