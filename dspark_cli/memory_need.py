"""How much memory a run would need, from the config and the scheme alone: for `dspark inspect`, of checkpoints and engines alike."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dspark.runtime.roofline.weights import WIDTH, ModelShape
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.kv_cache import KVCacheConfig, choose_cache_dtype
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import QuantConfig

PROGRAM_BYTES = 450_000_000
"""Python, the libraries, compiled kernels and their scratch, measured on the sample model; the rest of a run is computed."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of a run on a CPU with default settings, its KV cache full. kv_tokens, max_num_seqs: what that cache holds, at kv_dtype."""

    weights_bytes: int
    kv_cache_bytes: int
    activation_bytes: int
    kv_tokens: int
    max_num_seqs: int
    kv_dtype: str
    program_bytes: int = PROGRAM_BYTES

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.activation_bytes + self.program_bytes

    def document(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"total_bytes": self.total_bytes, **asdict(self), "device": "cpu"}


def memory_need(config: ModelConfig, quant: QuantConfig | None, kv_cache: KVCacheConfig | None = None) -> MemoryNeed:
    """kv_cache: what an engine's 8-bit cache was calibrated for."""
    run = EngineConfig()
    kv_dtype = choose_cache_dtype(kv_cache, config.dtype, run.kv_cache_dtype)
    tokens = run.default_pool_tokens(config.context_length)
    activations = run.max_num_batched_tokens * (4 * _inner(config) + 8 * config.hidden_size) * WIDTH[config.dtype]
    logits = 3 * run.max_num_seqs * config.vocab_size * WIDTH["float32"]
    return MemoryNeed(
        weights_bytes=weight_bytes(config, quant),
        kv_cache_bytes=tokens * kv_bytes_per_token(config, kv_dtype),
        activation_bytes=activations + logits,
        kv_tokens=tokens,
        max_num_seqs=run.max_num_seqs,
        kv_dtype=kv_dtype,
    )


def kv_bytes_per_token(config: ModelConfig, kv_dtype: str) -> int:
    """Keys and values of one token in every layer."""
    return ModelShape(config, kv_dtype=kv_dtype).kv_bytes_per_token


def weight_bytes(config: ModelConfig, quant: QuantConfig | None) -> int:
    """Of all weights as a CPU holds them."""
    return ModelShape(config, quant, layout="cpu").weight_bytes


def _inner(config: ModelConfig) -> int:
    """Width of the widest feed-forward block that a token takes."""
    experts = config.experts_per_token * config.moe_intermediate_size + config.shared_expert_intermediate_size
    return max(config.intermediate_size, experts)
