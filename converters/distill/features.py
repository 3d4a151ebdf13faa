"""What a drafter learns from: the target's tapped states and final states of every token, computed once, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from dspark.converters.calibration.driver import WalkOptions
from dspark.runtime.execution.layer_walk import LayerWalk, build_walk_layer
from dspark.runtime.execution.loader import EngineWeights
from dspark.runtime.models.decoder import build_head, load_embedding
from dspark.runtime.spec.manifest import EngineManifest
from dspark.runtime.spec.model_config import ModelConfig

Allocate = Callable[[int, int, torch.dtype], torch.Tensor]
"""(rows, columns, dtype) -> a matrix on the CPU that may lie in a file"""


@dataclass(frozen=True)
class Features:
    """tapped [T, taps * H]: residual streams after the tapped layers side by side; final [T, H]: after the target's final norm. ends: of
    each sample among the T tokens."""

    tapped: torch.Tensor
    final: torch.Tensor
    ends: list[int]

    def rows(self, sample: int) -> slice:
        """Where one sample's tokens stand."""
        return slice(self.ends[sample - 1] if sample else 0, self.ends[sample])


@dataclass(frozen=True)
class TargetVocabulary:
    """The frozen ends of the target, as training needs them: embedding and head float32 [V, H], on the training's device."""

    config: ModelConfig
    embedding: torch.Tensor
    head: torch.Tensor

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids int64 [...] -> [..., H], as the runtime embeds a drafter's rows."""
        config = self.config
        kind = getattr(torch, config.dtype) if config.round_embedding_multiplier else torch.float64
        return self.embedding[token_ids] * torch.tensor(config.embedding_multiplier, dtype=kind).item()

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Normed states [n, H] -> the output head's logits with the family's scaling and cap, float32 [n, V]."""
        logits = states.float() @ self.head.T
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        if self.config.logits_softcap is not None:
            logits = torch.tanh(logits / self.config.logits_softcap) * self.config.logits_softcap
        return logits

    def target_probabilities(self, final: torch.Tensor) -> torch.Tensor:
        """final [n, H] -> the target's distributions at temperature 1, float32 [n, V]."""
        return self.logits(final).softmax(-1)


def collect(
    engine_dir: Path, manifest: EngineManifest, samples: Sequence[Sequence[int]], taps: tuple[int, ...], device: str, allocate: Allocate
) -> tuple[Features, TargetVocabulary]:
    """Take the samples through the engine's layers, one layer in memory at a time. Features are bfloat16, float32 of a float32 engine."""
    config = manifest.model
    kernels = WalkOptions(device).kernels(config)
    weights = EngineWeights(engine_dir, manifest, kernels.facts.dtype, kernels.facts.device)
    kept = torch.float32 if config.dtype == "float32" else torch.bfloat16
    walk, width = LayerWalk(config, samples, kernels), config.hidden_size
    tapped = allocate(walk.num_tokens, len(taps) * width, kept)
    final = allocate(walk.num_tokens, width, kept)
    embedding = load_embedding(weights)
    walk.start(embedding)
    for layer in range(-1, config.num_layers):
        if layer >= 0:
            walk.advance(build_walk_layer(config, layer, manifest.quant, weights, kernels))
        if layer in taps:
            at = taps.index(layer) * width
            tapped[:, at : at + width] = walk.residual.to(kept)
    head = build_head(config, embedding, manifest.quant, weights, kernels)
    with torch.no_grad():
        for batch in walk.batches:
            final[batch.rows] = kernels.rms_norm(walk.residual[batch.rows], head.norm, config.rms_norm_eps).to(kept)
        tied = config.tie_word_embeddings
        # A projection of the unit vectors gives the dense weight of any storage, quantized ones too.
        dense = embedding if tied else head.projection(torch.eye(width, dtype=embedding.dtype, device=embedding.device)).T
        rows = embedding.float().contiguous()
        vocabulary = TargetVocabulary(config, rows, rows if tied else dense.float().contiguous())
    return Features(tapped, final, list(accumulate(map(len, samples)))), vocabulary
