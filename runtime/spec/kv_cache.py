"""The KV cache's dtype: what an engine was calibrated for, and what a run takes."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.runtime.spec.errors import UsageError

QUANTIZED_CACHES = ("int8", "fp8")
GRANULARITIES = ("tensor", "head", "channel")
CACHE_CHOICES = ("auto", "model", *QUANTIZED_CACHES, "bfloat16", "float16", "float32")
SCALE_LEAVES = ("k_scale", "v_scale")


@dataclass(frozen=True)
class KVCacheConfig:
    """How the scales of an engine's 8-bit cache came about. They are tensors `model.layers.N.self_attn.k_scale` and `.v_scale`, float32
    [num_kv_heads, head_dim]; a cache holds x / scale.

    dtype: one of QUANTIZED_CACHES. granularity: what shares a scale. method: "absmax" for largest magnitudes seen by us, else the format
    that brought the scales. margin: factor on those magnitudes. num_tokens: how many tokens were looked at.
    """

    dtype: str
    granularity: str
    method: str = "absmax"
    margin: float = 1.0
    num_tokens: int = 0

    def describe(self) -> str:
        """In words."""
        seen = f", {self.num_tokens} tokens" if self.num_tokens else ""
        return f"{self.dtype}, a scale per {self.granularity} ({self.method}{seen})"


def scale_names(layer: int) -> tuple[str, str]:
    """Names of one layer's scales, of keys and of values."""
    name = f"model.layers.{layer}.self_attn"
    return f"{name}.k_scale", f"{name}.v_scale"


def is_scale(name: str) -> bool:
    """Whether a tensor's name is that of a cache's scale."""
    return name.rpartition(".")[2] in SCALE_LEAVES


def choose_cache_dtype(calibrated: KVCacheConfig | None, model_dtype: str, wanted: str) -> str:
    """--kv-cache-dtype as the name of a dtype: "auto" is what the engine was calibrated for, else the model's, which "model" always is.

    Raises UsageError for an 8-bit cache whose scales the engine does not have, and for another model's dtype.
    """
    if wanted == "auto":
        return model_dtype if calibrated is None else calibrated.dtype
    if wanted in ("model", model_dtype):
        return model_dtype
    if wanted not in QUANTIZED_CACHES:
        raise UsageError(f"--kv-cache-dtype is {wanted}, the model's dtype is {model_dtype}", "type --kv-cache-dtype model")
    if calibrated is None or calibrated.dtype != wanted:
        has = "has no scales for the KV cache" if calibrated is None else f"has scales for {calibrated.dtype}"
        raise UsageError(
            f"--kv-cache-dtype is {wanted}, but the engine {has}",
            f"calibrate them: dspark quantize SOURCE ENGINE --scheme NAME --kv-cache-dtype {wanted}",
        )
    return wanted
