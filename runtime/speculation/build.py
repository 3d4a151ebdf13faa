"""From a run's settings to its speculator."""

from __future__ import annotations

from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.manifest import EngineManifest
from dspark.runtime.speculation.ngram import MAX_DRAFT, NgramProposer
from dspark.runtime.speculation.speculator import Speculator


def build_speculator(manifest: EngineManifest, config: EngineConfig) -> Speculator | None:
    """None for plain decoding."""
    if config.speculative == "off":
        return None
    most = config.num_speculative_tokens or MAX_DRAFT
    fixed = config.num_speculative_tokens if config.speculative != "auto" else None
    return Speculator([NgramProposer(most)], fixed, body_share(manifest))


def body_share(manifest: EngineManifest) -> float:
    """Share of a token's multiplications that are done before the head."""
    model = manifest.model
    head = model.vocab_size * model.hidden_size
    active = model.num_layers * _layer_weights(manifest)
    return active / (active + head)


def _layer_weights(manifest: EngineManifest) -> int:
    model = manifest.model
    attention = model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    if model.num_experts:
        width = model.experts_per_token * model.moe_intermediate_size + model.shared_expert_intermediate_size
    else:
        width = model.intermediate_size
    return attention + 3 * model.hidden_size * width
