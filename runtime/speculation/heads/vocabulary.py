"""From tokens to a drafter's inputs and from its outputs to logits over the target's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark.kernels.ops import Kernels, LinearFn
from dspark.runtime.layers.linear import load_linear
from dspark.runtime.layers.weights import WeightSource
from dspark.runtime.models.decoder import Decoder, embed
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.speculation.heads.config import DraftConfig
from dspark.runtime.speculation.heads.tensors import TARGET_OFFSETS


@dataclass
class Vocabulary:
    """embedding [V, H]. head: normed states [n, H] -> logits of the draft's tokens [n, draft vocabulary]. target_ids int64 [draft
    vocabulary]: the target's ids of them, None where the draft knows all of the target's V tokens.

    A shared head is the target's own projection, quantized or not; what the target's family does to logits afterwards (a divisor, a cap)
    is not done here: the draft was trained to give the target's final logits by its projection alone.
    """

    config: ModelConfig
    embedding: torch.Tensor
    head: LinearFn
    target_ids: torch.Tensor | None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids int64 [n] -> [n, H]."""
        return embed(self.config, self.embedding, token_ids)

    def widen(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the draft's tokens [n, draft vocabulary] -> float32 [n, V], -inf for tokens that it does not know."""
        if self.target_ids is None:
            return logits.float()
        wide = torch.full((logits.shape[0], self.config.vocab_size), -torch.inf, device=logits.device)
        wide[:, self.target_ids] = logits.float()
        return wide


def load_vocabulary(config: DraftConfig, weights: WeightSource, target: Decoder, kernels: Kernels) -> Vocabulary:
    """The draft's own embedding and head where it has them, else the target's. An own copy of the target's embedding is let go."""
    embedding = target.embedding
    if config.own_embedding:
        own = weights.take("embed_tokens.weight")
        embedding = embedding if torch.equal(own, embedding) else own
    ids = None
    if config.has_own_vocabulary:
        offsets = weights.take(TARGET_OFFSETS)
        ids = offsets + torch.arange(offsets.shape[0], device=offsets.device)
    if config.own_head:
        head = load_linear(["lm_head"], weights, None, kernels)
    else:
        head = target.head.projection if ids is None else _columns(target.head.projection, ids)
    return Vocabulary(config.model, embedding, head, ids)


def _columns(projection: LinearFn, ids: torch.Tensor) -> LinearFn:
    return lambda x: projection(x).index_select(-1, ids)
