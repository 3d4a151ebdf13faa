"""Gemma 3 (text): Gemma 2 with norms over each head of q and k, five sliding layers to one full one, and another rope in each kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dspark.runtime.models.base import Family, HFConfig
from dspark.runtime.models.gemma2 import GEMMA_DEFAULTS, read_gemma, write_gemma
from dspark.runtime.models.hf_rope import read_rope_table, write_rope_table
from dspark.runtime.models.hf_values import check_kinds
from dspark.runtime.spec.errors import InputError, UnsupportedError
from dspark.runtime.spec.model_config import ModelConfig, RopeConfig

_FULL_THETA, _SLIDING_THETA = 1e6, 1e4


def _read_ropes(config: HFConfig, max_position: int) -> tuple[RopeConfig, RopeConfig]:
    """Of the full and of the sliding layers: `rope_parameters` by layer type (transformers 5), else rope_theta, rope_scaling (of the full
    layers alone) and rope_local_base_freq (4)."""
    tables = config.get("rope_parameters") or {}
    if not isinstance(tables, dict) or set(tables) - {"full_attention", "sliding_attention"}:
        raise UnsupportedError(f"rope_parameters {tables!r:.80} is not supported, supported: full_attention and sliding_attention")
    scaling = config.get("rope_scaling") or {}
    ropes = []
    for kind, theta_key, theta, more in (
        ("full_attention", "rope_theta", _FULL_THETA, scaling),
        ("sliding_attention", "rope_local_base_freq", _SLIDING_THETA, {}),
    ):
        table = tables.get(kind) or {}
        if not isinstance(table, dict) or not isinstance(more, dict):
            raise InputError(f"config.json: rope settings are {table!r:.60} and {more!r:.60}, allowed: tables")
        table = {**table, **more}
        check_kinds(table)
        base = float(table.get("rope_theta") or config.get(theta_key) or theta)
        original = int(table.get("original_max_position_embeddings") or max_position)
        rope = read_rope_table(table, max_position, original, base)
        if rope.kind in ("dynamic", "longrope"):
            raise UnsupportedError(
                f"rope scaling '{rope.kind}' is not supported for gemma3_text", "supported: default, linear, llama3, yarn"
            )
        ropes.append(rope)
    return ropes[0], ropes[1]


def _read(config: HFConfig, known: dict[str, Any]) -> dict[str, Any]:
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    fields = read_gemma(config, known, full_every=pattern)
    full, sliding = _read_ropes(config, known["max_position"])
    # attn_logit_softcapping is a key of the family that its attention does not use
    fields |= {"qk_norm": True, "logits_softcap": config.get("final_logit_softcapping"), "rope": full}
    return fields | ({"local_rope": sliding} if "sliding_window" in fields else {})


def _write(model: ModelConfig) -> HFConfig:
    local = model.local_rope or RopeConfig(theta=_SLIDING_THETA)
    tables = {
        kind: {"rope_type": "default", "rope_theta": rope.theta, **(write_rope_table(rope) or {})}
        for kind, rope in (("full_attention", model.rope), ("sliding_attention", local))
    }
    return {**write_gemma(model), "rope_parameters": tables}


GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", _read, _write, replace(GEMMA_DEFAULTS, max_position=131072))
