"""A model's layers one at a time over the same tokens: for evaluation, calibration and audits of models that do not fit the memory whole.

Samples are laid side by side without padding, as in a serving step, and go through the modules and kernels that serve. Between two layers
only the residual stream of all tokens is held, [T, H] in the run's dtype; the KV cache is one layer's of one batch of samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dspark.kernels.ops import AttentionBatch, Kernels
from dspark.runtime.execution.forward_batch import build_forward_batch
from dspark.runtime.kv.pool import allocate_layer
from dspark.runtime.layers.rope import RotaryTables, Rotations
from dspark.runtime.layers.weights import WeightSource
from dspark.runtime.models.decoder import DecoderLayer, Head, build_head, build_layer, embed, load_embedding, load_first_norm
from dspark.runtime.scheduling.plan import ScheduledSequence, SchedulerOutput
from dspark.runtime.scheduling.sequence import Sequence as TokenSequence
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import QuantConfig
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams

BATCH_TOKENS = 4096
"""Tokens that go through a layer together: enough for full matrix products, few enough for the widest activation to stay small."""


@dataclass(frozen=True)
class WalkBatch:
    """Whole samples that go through a layer together. rows: where their tokens stand among all tokens of the walk."""

    rows: slice
    token_ids: torch.Tensor
    rotations: Rotations
    attention: AttentionBatch
    num_blocks: int


@dataclass
class WalkLayer:
    """One built layer. first_norm: of its input, None where the family has none; its last step adds to the stream and norms nothing."""

    index: int
    layer: DecoderLayer
    first_norm: torch.Tensor | None


class LayerWalk:
    """The residual stream of some samples, advanced layer by layer.

    samples: token ids of each, in any lengths up to the context. residual [T, H]: the stream before the next layer, in the order of the
    samples; a caller may move it elsewhere (to a file) as long as slices of it can be read and written.
    """

    def __init__(self, config: ModelConfig, samples: Sequence[Sequence[int]], kernels: Kernels, batch_tokens: int = BATCH_TOKENS) -> None:
        if not samples or not all(samples):
            raise ValueError("a walk needs samples, and each needs a token")
        self.config, self.kernels = config, kernels
        self.num_tokens = sum(map(len, samples))
        self.batches = list(_batches(config, samples, kernels, batch_tokens))
        self.residual = self.matrix(self.num_tokens, config.hidden_size)

    @torch.inference_mode()
    def start(self, embedding: torch.Tensor) -> None:
        """Fill the stream with the tokens' embeddings; embedding [V, H] as `load_embedding` gives it."""
        for batch in self.batches:
            self.residual[batch.rows] = embed(self.config, embedding, batch.token_ids)

    @torch.inference_mode()
    def advance(self, built: WalkLayer) -> None:
        """Take the whole stream through one layer."""
        for batch in self.batches:
            residual = self.residual[batch.rows].clone()
            hidden = self.normed(built, residual)
            layer = built.layer
            hidden = layer.attention.o_proj(self.attend(built, batch, hidden))
            hidden, residual = layer.after_attention(hidden, residual)
            _, residual = layer.after_mlp(layer.mlp(hidden), residual)
            self.residual[batch.rows] = residual

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        """An uninitialised matrix of the run's dtype on its device."""
        return torch.empty(rows, columns, dtype=self.kernels.facts.dtype, device=self.kernels.facts.device)

    def normed(self, built: WalkLayer, residual: torch.Tensor) -> torch.Tensor:
        """The layer's input [T, H] of a stretch of the stream."""
        return residual if built.first_norm is None else self.kernels.rms_norm(residual, built.first_norm, self.config.rms_norm_eps)

    def attend(self, built: WalkLayer, batch: WalkBatch, hidden: torch.Tensor) -> torch.Tensor:
        """A batch's attention without its output projection: hidden [T, H] -> [T, num_heads * D], with a cache of its own."""
        attention = built.layer.attention
        return attention(hidden, *batch.rotations[built.layer.rotation], self.cache(batch), batch.attention)

    def cache(self, batch: WalkBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """An empty KV cache of one layer with room for the batch."""
        facts = self.kernels.facts
        return allocate_layer(self.config, batch.num_blocks, facts.block_size, facts.kv_dtype, facts.device)

    @torch.inference_mode()
    def logits(self, head: Head, rows: slice) -> torch.Tensor:
        """Logits float32 [rows, V] of a stretch of the stream, once all layers are done."""
        return head(self.residual[rows]).float()


def build_walk_layer(config: ModelConfig, index: int, quant: QuantConfig | None, weights: WeightSource, kernels: Kernels) -> WalkLayer:
    """Take one layer's tensors from `weights`, none of another's."""
    first_norm = load_first_norm(config, index, weights)
    return WalkLayer(index, build_layer(config, index, None, quant, weights, kernels), first_norm)


def walk_model(walk: LayerWalk, quant: QuantConfig | None, weights: WeightSource) -> Head:
    """Take the samples through all layers, each built and dropped in turn. Returns the head, for `LayerWalk.logits`."""
    embedding = load_embedding(weights)
    walk.start(embedding)
    for index in range(walk.config.num_layers):
        walk.advance(build_walk_layer(walk.config, index, quant, weights, walk.kernels))
    return build_head(walk.config, embedding, quant, weights, walk.kernels)


def _batches(config: ModelConfig, samples: Sequence[Sequence[int]], kernels: Kernels, batch_tokens: int) -> Iterator[WalkBatch]:
    facts = kernels.facts
    rope = RotaryTables(config, max(map(len, samples)), facts.device)
    start, first = 0, 0
    while first < len(samples):
        last, tokens = first + 1, len(samples[first])
        while last < len(samples) and tokens + len(samples[last]) <= batch_tokens:
            tokens += len(samples[last])
            last += 1
        yield _batch(samples[first:last], start, rope, facts.block_size, facts.device)
        start, first = start + tokens, last


def _batch(samples: Sequence[Sequence[int]], start: int, rope: RotaryTables, block_size: int, device: str) -> WalkBatch:
    scheduled, num_blocks = [], 0
    for index, tokens in enumerate(samples):
        sequence = TokenSequence(Request(index, list(tokens), SamplingParams()), 0, 0)
        blocks = -(-len(tokens) // block_size)
        sequence.table.blocks.extend(range(num_blocks, num_blocks + blocks))
        num_blocks += blocks
        scheduled.append(ScheduledSequence(sequence, len(tokens)))
    batch = build_forward_batch(SchedulerOutput(scheduled), block_size, device)
    rotations = rope.lookup(batch.attention.positions, batch.rope_lengths)
    rows = slice(start, start + batch.token_ids.shape[0])
    return WalkBatch(rows, batch.token_ids, rotations, batch.attention, num_blocks)
