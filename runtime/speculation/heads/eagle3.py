"""EAGLE-3: one decoder layer that runs ahead of the target on the target's features, token after token.

Source: Li et al. 2025 (arXiv 2503.01840), with the options of its published checkpoints. The layer's input is a pair, the fused feature of
the token at t - 1 and the embedding of the token at t, at rope position t - 1. While it drafts, its own output stands in for the feature.

Where things lie. The pair of the token at t has its key and value in slot t, and the fused feature of the token at t lies in slot t of a
cache of its own: both depend on the tokens up to t alone, so pages are shared as the target's are. The token at 0 has no pair: slot 0 is
never read. The kernels read a context from its first slot on, but the order of keys is nothing to them; so a row reads a spare copy of its
sequence's first block, which has the row's own pair in slot 0.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import torch

from dspark.kernels.ops import AttentionBatch, Kernels, LinearFn
from dspark.kernels.staging import wait_for
from dspark.runtime.execution.forward_batch import ForwardBatch
from dspark.runtime.execution.graphs import Record
from dspark.runtime.layers.linear import load_linear
from dspark.runtime.layers.mlp import FeedForward, load_gated_mlp
from dspark.runtime.layers.norm import ResidualStep
from dspark.runtime.layers.rope import RotaryEmbedding, Rotations
from dspark.runtime.layers.weights import WeightSource
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.draft import Draft
from dspark.runtime.speculation.heads.attention import DraftAttention, load_draft_attention
from dspark.runtime.speculation.heads.chains import DraftChains, chains_for, draws_there
from dspark.runtime.speculation.heads.config import DraftConfig
from dspark.runtime.speculation.heads.pages import DraftPages, by_rows, lay_out
from dspark.runtime.speculation.heads.vocabulary import Vocabulary

AT_ONCE = 64
"""Sequences that are drafted for in one pass; each has a spare block."""
USUAL_STEPS = 5
"""Tokens of a draft where the checkpoint does not say how far it was trained to run ahead."""


@dataclass
class Fusion:
    """Tapped features [T, taps * target's H] -> fused ones [T, H]. input_norm: over all taps side by side; tap_norms: one for each."""

    fc: LinearFn
    input_norm: torch.Tensor | None
    tap_norms: list[torch.Tensor]
    eps: float
    kernels: Kernels

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        if self.input_norm is not None:
            features = self.kernels.rms_norm(features, self.input_norm, self.eps)
        if self.tap_norms:
            parts = features.chunk(len(self.tap_norms), -1)
            normed = [
                self.kernels.rms_norm(part.contiguous(), weight, self.eps) for part, weight in zip(parts, self.tap_norms, strict=True)
            ]
            features = torch.cat(normed, -1)
        return self.fc(features)


@dataclass
class EagleLayer:
    """after_mlp norms with the drafter's final norm. residual_is_normed: see DraftConfig.norm_before_residual."""

    token_norm: torch.Tensor
    feature_norm: torch.Tensor
    attention: DraftAttention
    after_attention: ResidualStep
    mlp: FeedForward
    after_mlp: ResidualStep
    residual_is_normed: bool
    eps: float
    kernels: Kernels

    def inputs(self, features: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and tokens' embeddings [n, H] of pairs -> what q, k and v are made of [n, 2 * H], and the residual [n, H]."""
        normed = self.kernels.rms_norm(features, self.feature_norm, self.eps)
        x = torch.cat([self.kernels.rms_norm(embedded, self.token_norm, self.eps), normed], -1)
        return x, normed if self.residual_is_normed else features

    def after(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Heads side by side -> (normed, raw) output [n, H]. The residual may be overwritten."""
        hidden, residual = self.after_attention(self.attention.o_proj(attended), residual)
        return self.after_mlp(self.mlp(hidden), residual)


class EagleDrafter:
    """An EAGLE-3 head as a Drafter. prior: the estimate of acceptance of each token. max_tokens: of a draft."""

    def __init__(
        self,
        config: DraftConfig,
        fusion: Fusion,
        layer: EagleLayer,
        vocabulary: Vocabulary,
        rope: RotaryEmbedding,
        sampler: Sampler,
        max_tokens: int,
        prior: float,
        keep_distributions: bool,
    ) -> None:
        self.config, self.taps, self.max_tokens = config, config.taps, max_tokens
        self._fusion, self._layer, self._vocabulary = fusion, layer, vocabulary
        self._rope, self._sampler, self._prior, self._keep = rope, sampler, prior, keep_distributions
        self._pages = DraftPages(layer.kernels, 1, AT_ONCE)
        self._features = torch.empty(0)
        facts = layer.kernels.facts
        self.bytes_per_block = self._pages.bytes_per_block + facts.block_size * config.model.hidden_size * facts.dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        facts = self._layer.kernels.facts
        self._pages.allocate(num_blocks)
        shape = (num_blocks + 1, facts.block_size, self.config.model.hidden_size)  # one more, for tokens of no sequence
        self._features = torch.empty(shape, dtype=facts.dtype, device=facts.device)

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._pages.copy_blocks(source, target)
        self._features[target] = self._features[source]

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._pages.copy_slots(source, target)
        features = self._features.flatten(0, 1)
        features[target] = features[source]

    def count_step(self, copies: Rows[tuple[int, int]]) -> None:
        """Nothing: what it has of a step lies in its layers."""

    def why_not_recorded(self) -> str | None:
        return self._pages.why_not_recorded()

    def record(self, record: Record) -> None:
        """Nothing so far: a draft's own steps are computed as they come."""

    def metrics(self) -> dict[str, Any]:
        return {}

    def absorb(self, batch: ForwardBatch, rotations: Rotations, features: torch.Tensor | None) -> None:
        """Keep the step's fused features, and write the keys and values of its tokens' pairs; in a tree a token follows its parent."""
        assert features is not None
        attention, flat = batch.attention, self._features.flatten(0, 1)
        stored = attention.slot_mapping
        flat[torch.where(stored < 0, flat.shape[0] + stored, stored)] = self._fusion(features)
        before = (attention.positions - 1).clamp(min=0)
        slots = slots_of(before, attention, self._features.shape[1]) if batch.slots_before is None else batch.slots_before
        previous = flat[slots]
        previous = previous.masked_fill((attention.positions == 0)[:, None], 0.0)  # nothing is before the first token
        x, _ = self._layer.inputs(previous, self._vocabulary.embed(batch.token_ids))
        self._layer.attention.store(x, *self._rope.lookup(before), self._pages.caches[0], attention.slot_mapping)

    @torch.inference_mode()
    def draft(self, sequences: list[Sequence], rooms: list[int]) -> list[Draft | None]:
        """Chains of up to max_tokens; a sequence of which nothing is computed has no feature to start from."""
        drafts: list[Draft | None] = [None] * len(sequences)
        rows = [min(self.max_tokens, room) if seq.num_computed else 0 for seq, room in zip(sequences, rooms, strict=True)]
        kinds = [draws_there(self._sampler, seq) for seq in sequences]
        drawn = [(members, self._draw_chains([sequences[i] for i in members], steps)) for steps, members in by_rows(rows, AT_ONCE, kinds)]
        for members, chains in drawn:
            for i, draft in zip(members, chains.drafts(self.config.method), strict=True):
                drafts[i] = draft
        wait_for(self._layer.kernels.facts.device)
        return drafts

    def _draw_chains(self, sequences: list[Sequence], steps: int) -> DraftChains:
        layer, cache, count = self._layer, self._pages.caches[0], len(sequences)
        facts = layer.kernels.facts
        chains = chains_for(self._sampler, sequences, [steps] * count, self._keep)
        laid = lay_out(sequences, steps, facts.block_size, facts.device, chains)
        first, tables = laid.tables[:, 0].long(), laid.tables.clone()
        spare = self._pages.num_blocks + torch.arange(count, device=first.device)
        tables[:, 0] = spare.to(tables.dtype)
        query_start = torch.arange(count + 1, dtype=torch.int32, device=first.device)
        last = laid.starts - 1
        blocks = laid.tables[torch.arange(count, device=first.device), last // facts.block_size].long()
        fed = self._features.flatten(0, 1)[blocks * facts.block_size + last % facts.block_size]
        for step in range(steps):
            tokens = chains.newest() if step else laid.newest
            x, residual = layer.inputs(fed, self._vocabulary.embed(tokens))
            qkv = layer.attention.project(x)
            slots, positions = laid.slots.view(count, steps)[:, step], laid.positions.view(count, steps)[:, step]
            cos, sin = (table.repeat(2, 1) for table in self._rope.lookup(positions - 1))
            layer.kernels.copy_blocks(*cache, first, spare)
            # the pair goes into its own slot, for the rows that follow, and into the spare block's first
            both = torch.cat([slots, spare * facts.block_size])
            q = layer.attention.rotate_and_store(qkv.repeat(2, 1), cos, sin, cache, both)[:count]
            batch = AttentionBatch(query_start, positions.to(torch.int32), tables, slots, positions, 1, laid.max_start + step)
            normed, raw = layer.after(layer.attention.attend(q, cache, batch), residual)
            chains.draw(self._vocabulary.widen(self._vocabulary.head(normed)), [self._prior] * count)
            if chains.all_closed:
                break
            fed = normed if self.config.norm_output else raw
        return chains


def slots_of(positions: torch.Tensor, attention: AttentionBatch, block_size: int) -> torch.Tensor:
    """Slots int64 [T] of positions [T] of the tokens' own sequences; tokens behind the last sequence's pass for its."""
    ends = attention.query_start[1:]
    owner = torch.searchsorted(ends, torch.arange(positions.shape[0], dtype=ends.dtype, device=ends.device), right=True)
    owner = owner.clamp(max=ends.shape[0] - 1)
    return attention.block_tables[owner, positions // block_size].long() * block_size + positions % block_size


def load_eagle_drafter(
    config: DraftConfig,
    weights: WeightSource,
    vocabulary: Vocabulary,
    kernels: Kernels,
    rope: RotaryEmbedding,
    sampler: Sampler,
    max_tokens: int | None,
    prior: float,
    keep_distributions: bool,
) -> EagleDrafter:
    """Take every tensor but the vocabulary's. max_tokens: of a draft, default as far as it was trained to run."""
    model, layer = config.model, "layers.0"

    def norm(name: str) -> torch.Tensor:
        return weights.take(f"{name}.weight")

    fusion = Fusion(
        fc=load_linear(["fc"], weights, None, kernels),
        input_norm=norm("input_norm") if config.norm_before_fc else None,
        tap_norms=[norm(f"fc_norm.{tap}") for tap in range(len(config.taps))] if config.fc_norm else [],
        eps=model.rms_norm_eps,
        kernels=kernels,
    )
    built = EagleLayer(
        token_norm=norm(f"{layer}.input_layernorm"),
        feature_norm=norm(f"{layer}.hidden_norm"),
        attention=load_draft_attention(f"{layer}.self_attn", model, weights, kernels),
        after_attention=ResidualStep(None, 1.0, norm(f"{layer}.post_attention_layernorm"), model.rms_norm_eps, kernels),
        mlp=load_gated_mlp(f"{layer}.mlp", model.hidden_act, None, weights, kernels),
        after_mlp=ResidualStep(None, 1.0, norm("norm"), model.rms_norm_eps, kernels),
        residual_is_normed=config.norm_before_residual,
        eps=model.rms_norm_eps,
        kernels=kernels,
    )
    steps = max_tokens or config.trained_steps or USUAL_STEPS
    return EagleDrafter(config, fusion, built, vocabulary, rope, sampler, steps, prior, keep_distributions)
