"""Mixtral: Mistral's layout with a mixture of experts in every layer; the shares of the experts taken add up to 1."""

from __future__ import annotations

import re
from typing import Any

from dspark.runtime.models.base import Defaults, Family, HFConfig
from dspark.runtime.spec.model_config import ModelConfig

_LINEARS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LINEAR = re.compile(r"\b(gate_proj|up_proj|down_proj)\b")


def _read(config: HFConfig, known: dict[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": config.get("sliding_window"),
        "num_experts": config.get("num_local_experts") or config.get("num_experts") or 8,
        "experts_per_token": config.get("num_experts_per_tok") or 2,
        "moe_intermediate_size": known["intermediate_size"],
        "norm_topk_prob": True,
    }


def _write(model: ModelConfig) -> HFConfig:
    return {
        "sliding_window": model.sliding_window,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
    }


def _saved_as(name: str) -> str:
    """mlp.experts.0.gate_proj -> block_sparse_moe.experts.0.w1, mlp.gate -> block_sparse_moe.gate."""
    return _LINEAR.sub(lambda match: _LINEARS[match[1]], name.replace(".mlp.", ".block_sparse_moe."))


_DEFAULTS = Defaults(max_position=4096 * 32, num_kv_heads=8, rms_norm_eps=1e-5, rope_theta=1e6)
MIXTRAL = Family("mixtral", "MixtralForCausalLM", _read, _write, _DEFAULTS, saved_as=_saved_as)
