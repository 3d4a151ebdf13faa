"""Scales of a KV cache in a compressed-tensors checkpoint: `kv_cache_scheme` of its config, tensors `...self_attn.k_scale` and `.v_scale`.

One for the layer [1] (or []), or one for each key/value head [num_kv_heads, 1, 1]. A stored number is x / scale, as in an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dspark.runtime.spec.kv_cache import KVCacheConfig, scale_names
from dspark.runtime.spec.model_config import ModelConfig

if TYPE_CHECKING:
    import torch

_DTYPES = {"float": "fp8", "int": "int8"}
_GRANULARITIES = {"tensor": "tensor", "attn_head": "head"}


def read_scheme(scheme: Any, method: str) -> KVCacheConfig | str:
    """The cache that a kv_cache_scheme describes, or why it is none that an engine can have."""
    if not isinstance(scheme, dict):
        return "the config has no kv_cache_scheme"
    dtype, bits = _DTYPES.get(str(scheme.get("type", "int"))), scheme.get("num_bits", 8)
    if dtype is None or bits != 8:
        return f"{bits}-bit {scheme.get('type', 'int')} is not supported"
    if scheme.get("dynamic"):
        return "dynamic scales are not supported"
    if not scheme.get("symmetric", True):
        return "zero points are not supported"
    granularity = _GRANULARITIES.get(str(scheme.get("strategy") or "tensor"))
    if granularity is None:
        return f"strategy {scheme['strategy']} is not supported"
    return KVCacheConfig(dtype, granularity, method)


def check_scales(config: ModelConfig, names: set[str], load: Callable[[str], torch.Tensor]) -> str | None:
    """Why the scales do not do, None when they do: every layer has both, of a shape that is understood, positive, and not left at 1."""
    wanted = [name for layer in range(config.num_layers) for name in scale_names(layer)]
    missing = [name for name in wanted if name not in names]
    if missing:
        return f"{missing[0]} is missing"
    untouched = True
    for name in wanted:
        scale = load(name).float()
        if scale.numel() not in (1, config.num_kv_heads):
            return f"{name} has shape {list(scale.shape)}"
        if not bool(((scale > 0) & scale.isfinite()).all()):
            return f"{name} is not positive"
        untouched = untouched and bool((scale == 1).all())
    return "every scale is 1, so nothing was calibrated" if untouched else None


def spread(scale: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """A checkpoint's scale as an engine stores it, float32 [num_kv_heads, head_dim]."""
    return scale.float().reshape(-1, 1).expand(config.num_kv_heads, config.head_dim).contiguous()
