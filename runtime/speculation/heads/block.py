"""DSpark and DFlash: a block of rows beside the target's features, denoised in one pass.

Sources: DSpark (arXiv 2607.05147, section 3) and DFlash. A layer's context is one vector for each token, c = norm(fc(features)), the same
for all layers: each layer makes keys and values of it with the very projections that it has for its rows, and nothing else. The rows are
the newest token (the anchor) and mask tokens; each sees the whole context and all rows, in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import torch

from dspark.kernels.ops import Kernels, LinearFn
from dspark.kernels.staging import wait_for
from dspark.runtime.execution.forward_batch import ForwardBatch
from dspark.runtime.execution.graphs import Record, Recordings
from dspark.runtime.layers.linear import load_linear
from dspark.runtime.layers.mlp import FeedForward, load_gated_mlp
from dspark.runtime.layers.norm import ResidualStep
from dspark.runtime.layers.rope import RotaryEmbedding, Rotations
from dspark.runtime.layers.weights import WeightSource
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.speculation.draft import Draft
from dspark.runtime.speculation.heads.attention import DraftAttention, load_draft_attention
from dspark.runtime.speculation.heads.chains import DraftChains, chains_for, draws_there
from dspark.runtime.speculation.heads.config import DraftConfig
from dspark.runtime.speculation.heads.markov import ConfidenceHead, MarkovHead, load_confidence, load_markov
from dspark.runtime.speculation.heads.pages import DraftPages, DraftPass, LayerCache, by_rows, lay_out
from dspark.runtime.speculation.heads.vocabulary import Vocabulary

LOGITS_AT_ONCE = 1 << 26
"""Logits held at a time (float32: 256 MiB): more sequences than that allows are drafted in several passes."""


@dataclass
class BlockLayer:
    """One layer of the backbone, in the form of the runtime's decoder layers."""

    attention: DraftAttention
    after_attention: ResidualStep
    mlp: FeedForward
    after_mlp: ResidualStep


@dataclass
class BlockBackbone:
    """fc [H, taps * target's H] and hidden_norm make the context, first_norm is of the first layer's input; the last layer's last step
    norms with the drafter's own final norm."""

    fc: LinearFn
    hidden_norm: torch.Tensor
    first_norm: torch.Tensor
    layers: list[BlockLayer]
    eps: float
    kernels: Kernels

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """features [T, taps * target's H] -> c [T, H]."""
        return self.kernels.rms_norm(self.fc(features), self.hidden_norm, self.eps)

    def rows(self, embedded: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, caches: list[LayerCache], laid: DraftPass) -> torch.Tensor:
        """Embedded rows [S * rows, H] -> normed states [S * rows, H]. Their keys and values stay behind in their slots."""
        residual = embedded
        hidden = self.kernels.rms_norm(residual, self.first_norm, self.eps)
        for layer, cache in zip(self.layers, caches, strict=True):
            attention = layer.attention
            q = attention.rotate_and_store(attention.project(hidden), cos, sin, cache, laid.slots)
            hidden = attention.o_proj(attention.see_all(q, cache, laid))
            hidden, residual = layer.after_attention(hidden, residual)
            hidden, residual = layer.after_mlp(layer.mlp(hidden), residual)
        return hidden


class BlockDrafter:
    """A DSpark or DFlash head as a Drafter. prior: stands in for the estimate of acceptance where there is no confidence head."""

    def __init__(
        self,
        config: DraftConfig,
        backbone: BlockBackbone,
        vocabulary: Vocabulary,
        markov: MarkovHead | None,
        confidence: ConfidenceHead | None,
        rope: RotaryEmbedding,
        sampler: Sampler,
        prior: float,
        keep_distributions: bool,
    ) -> None:
        assert config.mask_token_id is not None
        self.config, self.taps = config, config.taps
        self.max_tokens = config.drafts_per_block
        self._backbone, self._vocabulary, self._markov, self._confidence = backbone, vocabulary, markov, confidence
        self._rope, self._sampler, self._prior, self._keep = rope, sampler, prior, keep_distributions
        self._pages = DraftPages(backbone.kernels, len(backbone.layers))
        self.bytes_per_block = self._pages.bytes_per_block
        self._recordings: Recordings | None = None
        self._no_recordings: str | None = None

    def allocate(self, num_blocks: int) -> None:
        self._pages.allocate(num_blocks)

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._pages.copy_blocks(source, target)

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._pages.copy_slots(source, target)

    def count_step(self, copies: Rows[tuple[int, int]]) -> None:
        """Nothing: what it has of a step lies in its layers."""

    def why_not_recorded(self) -> str | None:
        return self._pages.why_not_recorded()

    def record(self, record: Record) -> None:
        """A pass through the layers, by numbers of sequences and rows."""
        self._no_recordings = self._pages.why_not_recorded()
        if self._no_recordings is None:
            self._recordings = Recordings(record, self._backbone.kernels.facts.device)

    def metrics(self) -> dict[str, Any]:
        if self._recordings is not None:
            return {"draft_graphs": self._recordings.metrics()}
        return {"draft_graphs": {"off": self._no_recordings}} if self._no_recordings is not None else {}

    def absorb(self, batch: ForwardBatch, rotations: Rotations, features: torch.Tensor | None) -> None:
        """Write the context's keys and values of the step's tokens, of draft tokens too: those that are rejected are written over when
        the tokens in their places are known, and no pass sees them before."""
        assert features is not None
        context = self._backbone.context(features)
        cos, sin = self._rope.lookup(batch.attention.positions)
        for layer, cache in zip(self._backbone.layers, self._pages.caches, strict=True):
            layer.attention.store(context, cos, sin, cache, batch.attention.slot_mapping)

    @torch.inference_mode()
    def draft(self, sequences: list[Sequence], rooms: list[int]) -> list[Draft | None]:
        """Blocks of the trained number of rows; where a sequence has no room for them, as many as fit (fewer mask rows draft worse, not
        wrongly). Sequences with equal rows go together."""
        drafts: list[Draft | None] = [None] * len(sequences)
        fitting = [min(self.config.block_size, room + 1) for room in rooms]
        rows = [count if min(room, self._num_drafts(count)) > 0 else 0 for count, room in zip(fitting, rooms, strict=True)]
        at_once = max(1, LOGITS_AT_ONCE // (self.config.block_size * self.config.draft_vocab_size))
        kinds = [draws_there(self._sampler, seq) for seq in sequences]
        drawn = []
        for count, members in by_rows(rows, at_once, kinds):
            limits = [min(rooms[i], self._num_drafts(count)) for i in members]
            drawn.append((members, self._draw_blocks([sequences[i] for i in members], limits, count)))
        for members, chains in drawn:
            for i, draft in zip(members, chains.drafts(self.config.method), strict=True):
                drafts[i] = draft
        wait_for(self._backbone.kernels.facts.device)
        return drafts

    def _num_drafts(self, rows: int) -> int:
        return rows if self.config.sample_from_anchor else rows - 1

    def _draw_blocks(self, sequences: list[Sequence], limits: list[int], rows: int) -> DraftChains:
        facts = self._backbone.kernels.facts
        chains = chains_for(self._sampler, sequences, limits, self._keep)
        laid = lay_out(sequences, rows, facts.block_size, facts.device, chains, self._recordings)
        states, previous = self._replayed(laid, len(sequences)), laid.newest[: len(sequences)]
        if not self.config.sample_from_anchor:
            states = states[:, 1:]  # a row fills its own place, and the first one's is taken
        states = states[:, : max(limits)]
        logits = self._vocabulary.head(states.flatten(0, 1)).unflatten(0, states.shape[:2])
        embedded, memory = None, None
        for index in range(states.shape[1]):
            state, row = states[:, index], logits[:, index].float()
            if self._markov is not None:
                previous = chains.newest() if index else previous
                embedded = self._markov.embed(previous)
                bias, memory = self._markov.bias(embedded, state, memory)
                row = row + bias.float()
            survival = [self._prior] * len(sequences) if self._confidence is None else self._confidence(state, embedded, index)
            chains.draw(self._vocabulary.widen(row), survival)
            if chains.all_closed:
                break
        return chains

    def _replayed(self, laid: DraftPass, count: int) -> torch.Tensor:
        """`_states`, by a recording if there is one for it. It may be read until the next pass."""
        shape = laid.shape
        if shape is None or self._recordings is None:
            return self._states(laid)
        return self._recordings.run(shape, lambda there: self._states(shape.of(there)))[:count]

    def _states(self, laid: DraftPass) -> torch.Tensor:
        """Normed states [S, rows, H] of blocks that begin at the sequences' newest tokens."""
        tokens = laid.newest.new_full((laid.newest.shape[0], laid.rows), int(self.config.mask_token_id or 0))
        tokens[:, 0] = laid.newest
        cos, sin = self._rope.lookup(laid.positions)
        embedded = self._vocabulary.embed(tokens.flatten())
        return self._backbone.rows(embedded, cos, sin, self._pages.caches, laid).unflatten(0, tokens.shape)


def load_block_backbone(config: DraftConfig, weights: WeightSource, kernels: Kernels) -> BlockBackbone:
    """Take the backbone's tensors."""
    model: ModelConfig = config.model

    def norm(name: str) -> torch.Tensor:
        return weights.take(f"{name}.weight")

    def step(pre_norm: torch.Tensor) -> ResidualStep:
        return ResidualStep(None, 1.0, pre_norm, model.rms_norm_eps, kernels)

    first_norms = [norm(f"layers.{i}.input_layernorm") for i in range(model.num_layers)]
    next_norms = [*first_norms[1:], norm("norm")]
    layers = [
        BlockLayer(
            attention=load_draft_attention(f"layers.{i}.self_attn", model, weights, kernels),
            after_attention=step(norm(f"layers.{i}.post_attention_layernorm")),
            mlp=load_gated_mlp(f"layers.{i}.mlp", model.hidden_act, None, weights, kernels),
            after_mlp=step(next_norms[i]),
        )
        for i in range(model.num_layers)
    ]
    fc = load_linear(["fc"], weights, None, kernels)
    return BlockBackbone(fc, norm("hidden_norm"), first_norms[0], layers, model.rms_norm_eps, kernels)


def load_block_drafter(
    config: DraftConfig,
    weights: WeightSource,
    vocabulary: Vocabulary,
    kernels: Kernels,
    rope: RotaryEmbedding,
    sampler: Sampler,
    prior: float,
    keep_distributions: bool,
) -> BlockDrafter:
    """Take every tensor but the vocabulary's."""
    backbone = load_block_backbone(config, weights, kernels)
    markov, confidence = load_markov(config, weights, kernels), load_confidence(config, weights)
    return BlockDrafter(config, backbone, vocabulary, markov, confidence, rope, sampler, prior, keep_distributions)
