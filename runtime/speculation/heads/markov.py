"""DSpark's small heads: the bias that the previous token puts on a row's logits, and the estimate that a draft token is accepted.

Source: arXiv 2607.05147, section 3.2, and its reference code; the order of concatenations is the latter's. The bias is added before the
temperature and before anything that a request asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark.kernels.ops import Kernels, LinearFn
from dspark.runtime.layers.linear import load_linear
from dspark.runtime.layers.weights import WeightSource
from dspark.runtime.speculation.heads.config import DraftConfig


@dataclass
class MarkovHead:
    """One chain of a block: `bias` is called for row after row. w1 [V, r]: embedding of the previous token; w2: r -> draft vocabulary.

    kind: one of MARKOV_HEADS. mixing: of the gated kind r values of (state, embedding), of the recurrent kind 3 r of (memory, embedding,
    state), None for vanilla.
    """

    kind: str
    w1: torch.Tensor
    w2: LinearFn
    mixing: LinearFn | None

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        """previous int64 [n]: the target's ids of the tokens before -> [n, r]."""
        return self.w1[previous]

    def bias(self, embedded: torch.Tensor, state: torch.Tensor, memory: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """embedded [n, r], state [n, H] (normed), memory [n, r] of the row before (None at the first) -> bias [n, draft vocabulary] and
        the memory for the next row."""
        if self.mixing is None:
            return self.w2(embedded), None
        if self.kind == "gated":
            return self.w2(torch.sigmoid(self.mixing(torch.cat([state, embedded], -1))) * embedded), None
        memory = torch.zeros_like(embedded) if memory is None else memory
        gate, candidate, out = self.mixing(torch.cat([memory, embedded, state], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return self.w2(torch.tanh(out)), gate * memory + (1 - gate) * torch.tanh(candidate)


@dataclass
class ConfidenceHead:
    """weight float32 [1, H (+ r)], bias float32 [1]. temperatures: see DraftConfig."""

    weight: torch.Tensor
    bias: torch.Tensor
    with_markov: bool
    temperatures: tuple[float, ...]

    def __call__(self, state: torch.Tensor, embedded: torch.Tensor | None, index: int) -> torch.Tensor:
        """Estimates float32 [n], for each of n chains, that draft token number `index` (from 0) is accepted given that those before are.

        state [n, H] of the row that predicts it (normed); embedded [n, r] of the token before it: what it says may not depend on the
        token itself, or a choice by it would bend what is drawn.
        """
        inputs = state.float() if not self.with_markov or embedded is None else torch.cat([state.float(), embedded.float()], -1)
        temperature = self.temperatures[index] if index < len(self.temperatures) else 1.0
        scores = torch.nn.functional.linear(inputs, self.weight, self.bias)[:, 0]
        return torch.sigmoid(scores / temperature)


def load_markov(config: DraftConfig, weights: WeightSource, kernels: Kernels) -> MarkovHead | None:
    if config.markov is None:
        return None
    mixing = {"gated": "gate_proj", "rnn": "joint_proj"}.get(config.markov)
    return MarkovHead(
        kind=config.markov,
        w1=weights.take("markov_head.markov_w1.weight"),
        w2=load_linear(["markov_head.markov_w2"], weights, None, kernels),
        mixing=None if mixing is None else load_linear([f"markov_head.{mixing}"], weights, None, kernels),
    )


def load_confidence(config: DraftConfig, weights: WeightSource) -> ConfidenceHead | None:
    if not config.confidence:
        return None
    weight, bias = (weights.take(f"confidence_head.proj.{leaf}").float() for leaf in ("weight", "bias"))
    return ConfidenceHead(weight, bias, config.confidence_with_markov, config.temperatures)
