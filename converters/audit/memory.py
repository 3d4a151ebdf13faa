"""What comparing logits takes: the model whole on one side after the other, or a layer of it at a time. Estimates from the config."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dspark.converters.mapping import expected_tensors, parameter_count
from dspark.runtime.spec.model_config import ModelConfig

FLOAT_BYTES = 4
LOADING = 1.5
"""A whole model while it is loaded, in bare weights: fused and stacked ones are there twice for a moment."""
LAYER_LOADING = 2.0
"""The same of one layer, which may be nothing but such weights, or be held as codes too."""
LIBRARY_BYTES = 200_000_000
"""transformers' model classes, compiled loops, threads' scratch: loaded for the audit."""
HEAD_ROWS = 64
"""Tokens whose logits are computed together when memory counts."""


def whole_bytes(config: ModelConfig, prompts: Sequence[Sequence[int]]) -> int:
    """Bytes to run the whole model in float32 and keep both sides' logits."""
    logits = 2 * sum(map(len, prompts)) * config.vocab_size * FLOAT_BYTES
    return int(parameter_count(config) * FLOAT_BYTES * LOADING) + logits + _other_bytes(config, prompts)


def layered_bytes(config: ModelConfig, prompts: Sequence[Sequence[int]]) -> int:
    """Bytes to run it a layer at a time: the largest layer, or the head with one side's logits."""
    head = config.vocab_size * config.hidden_size + (sum(map(len, prompts)) + 4 * HEAD_ROWS) * config.vocab_size
    return max(int(_largest_layer(config) * LAYER_LOADING), head) * FLOAT_BYTES + _other_bytes(config, prompts)


def _largest_layer(config: ModelConfig) -> int:
    """Parameters."""
    counts = [0] * config.num_layers
    for name, shape in expected_tensors(config).items():
        if name.startswith("model.layers."):
            counts[int(name.split(".")[2])] += math.prod(shape)
    return max(counts)


def _other_bytes(config: ModelConfig, prompts: Sequence[Sequence[int]]) -> int:
    """Beside weights and logits: the libraries, both sides' streams, attention scores and inner activations of the longest prompt."""
    longest, total = max(map(len, prompts)), sum(map(len, prompts))
    inner = max(config.intermediate_size, config.experts_per_token * config.moe_intermediate_size + config.shared_expert_intermediate_size)
    scores = 4 * config.num_heads * longest * longest
    return LIBRARY_BYTES + FLOAT_BYTES * (scores + total * (4 * inner + 8 * config.hidden_size))
