"""OLMo 2: no norm before the blocks but one on each result, and RMS norms over the whole width of q and of k."""

from __future__ import annotations

from typing import Any

from dspark.runtime.models.base import Defaults, Family, HFConfig, attention_bias
from dspark.runtime.spec.model_config import ModelConfig


def _read(config: HFConfig, known: dict[str, Any]) -> dict[str, Any]:
    return {**attention_bias(config), "qk_norm": True, "full_width_qk_norm": True, "pre_norms": False, "post_norms": True}


def _write(model: ModelConfig) -> HFConfig:
    return {"attention_bias": model.qkv_bias}


_DEFAULTS = Defaults(rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=50279, pad_token_id=1)
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _read, _write, _DEFAULTS)
