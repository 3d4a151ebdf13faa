"""The decoder that all families share: embed, layers, norm, head.

Family deltas are numbers and flags of ModelConfig; each becomes an object or a value of a layer when the model is built, so that the
forward pass is the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from dspark.kernels.ops import AttentionBatch, Kernels, LinearFn, Rows, input_format
from dspark.runtime.layers.attention import Attention, load_kv_scales
from dspark.runtime.layers.linear import load_linear
from dspark.runtime.layers.mlp import FeedForward, load_gated_mlp
from dspark.runtime.layers.moe import load_moe
from dspark.runtime.layers.norm import ResidualStep, load_norm
from dspark.runtime.layers.rope import Rotations
from dspark.runtime.layers.weights import WeightSource
from dspark.runtime.models.base import norm_names
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import QuantConfig

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class DecoderLayer:
    """Attention and feed-forward, each followed by its step onto the residual stream (which also makes the next block's input).

    rotation: which of the step's rotations this layer takes.
    """

    attention: Attention
    after_attention: ResidualStep
    mlp: FeedForward
    after_mlp: ResidualStep
    rotation: int


@dataclass
class Head:
    """Residual stream [rows, H] -> logits [rows, V]: the final norm, the projection, the family's scaling and cap."""

    norm: torch.Tensor
    projection: LinearFn
    config: ModelConfig
    kernels: Kernels

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Capped logits are float32, since tanh in 16 bits would make ties."""
        config = self.config
        logits = self.projection(self.kernels.rms_norm(hidden, self.norm, config.rms_norm_eps))
        if config.logits_divisor != 1.0:
            logits = logits / config.logits_divisor
        if config.logits_softcap is not None:
            logits = torch.tanh(logits.float() / config.logits_softcap) * config.logits_softcap
        return logits


@dataclass
class Decoder:
    """A loaded model. forward: token ids -> hidden states; logits: hidden states of the rows that draw a token -> logits.

    embedding [V, H]. first_norm: of the first layer's input.
    """

    config: ModelConfig
    kernels: Kernels
    embedding: torch.Tensor
    first_norm: torch.Tensor | None
    layers: list[DecoderLayer]
    head: Head

    def forward(
        self, token_ids: torch.Tensor, rotations: Rotations, caches: KVCaches, batch: AttentionBatch, rows: torch.Tensor
    ) -> torch.Tensor:
        """token_ids int64 [T], rotations as RotaryTables.lookup gives them -> residual stream after the last layer, before the final norm,
        of the tokens `rows` (int64 [rows], ascending) [rows, H]. In the last layer the other tokens only leave their keys and values."""
        return self.forward_tapped(token_ids, rotations, caches, batch, rows, ())[0]

    def forward_tapped(
        self,
        token_ids: torch.Tensor,
        rotations: Rotations,
        caches: KVCaches,
        batch: AttentionBatch,
        rows: torch.Tensor,
        taps: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same, and the residual stream of all tokens after each layer of `taps` (-1: before the first), side by side: [T, taps * H],
        None without taps. It is transformers' hidden_states[layer + 1]; the last layer is no tap, not all tokens go through it."""
        assert not taps or taps[-1] < len(self.layers) - 1, "the last layer is no tap"
        residual = embed(self.config, self.embedding, token_ids)
        width = residual.shape[1]
        features = residual.new_empty(residual.shape[0], len(taps) * width) if taps else None

        def tap(layer: int) -> None:
            if features is not None and layer in taps:
                at = taps.index(layer) * width
                features[:, at : at + width] = residual  # a copy: the stream is updated in place

        tap(-1)
        hidden = self._first_input(residual)
        for i, layer in enumerate(self.layers):
            hidden = layer.attention(hidden, *rotations[layer.rotation], caches[i], batch)
            if i + 1 == len(self.layers) and rows.shape[0] < residual.shape[0]:
                hidden, residual = hidden[rows], residual[rows]
            hidden = layer.attention.o_proj(hidden)
            hidden, residual = layer.after_attention(hidden, residual)
            hidden = layer.mlp(hidden)
            hidden, residual = layer.after_mlp(hidden, residual)
            tap(i)
        return residual, features

    def _first_input(self, residual: torch.Tensor) -> Rows:
        """The first layer's input, as codes where its attention takes such."""
        if self.first_norm is None:
            return residual
        inputs = input_format(self.layers[0].attention)
        if inputs is not None:
            return self.kernels.rms_norm_quantize(residual, self.first_norm, self.config.rms_norm_eps, inputs)
        return self.kernels.rms_norm(residual, self.first_norm, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Residual stream [rows, H] -> logits [rows, V]."""
        return self.head(hidden)


def embed(config: ModelConfig, embedding: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """token_ids int64 [T] -> rows of the embedding [V, H] times the family's factor, itself rounded to the rows' dtype where it says so."""
    rows = embedding[token_ids]
    if config.embedding_multiplier == 1.0:
        return rows
    scale = torch.tensor(config.embedding_multiplier, dtype=rows.dtype if config.round_embedding_multiplier else torch.float64)
    return rows * scale.item()


def build_decoder(config: ModelConfig, quant: QuantConfig | None, weights: WeightSource, kernels: Kernels) -> Decoder:
    """Take every tensor of the model from `weights`, layer by layer, and re-lay it for the kernels."""
    embedding = load_embedding(weights)
    first_norms = [load_first_norm(config, i, weights) for i in range(config.num_layers)]
    layers = [build_layer(config, i, [*first_norms, None][i + 1], quant, weights, kernels, True) for i in range(config.num_layers)]
    for layer, following in pairwise(layers):
        layer.after_mlp.inputs = input_format(following.attention)
    return Decoder(config, kernels, embedding, first_norms[0], layers, build_head(config, embedding, quant, weights, kernels))


def load_embedding(weights: WeightSource) -> torch.Tensor:
    """Rows of the tokens [V, H]."""
    return weights.take("model.embed_tokens.weight")


def build_head(config: ModelConfig, embedding: torch.Tensor, quant: QuantConfig | None, weights: WeightSource, kernels: Kernels) -> Head:
    """The final norm and the projection onto the vocabulary, which is the embedding where both are tied."""
    norm = load_norm("model.norm", weights, config.norm_offset)
    tied = config.tie_word_embeddings
    projection = kernels.dense_linear(embedding) if tied else load_linear(["lm_head"], weights, quant, kernels)
    return Head(norm, projection, config, kernels)


def load_first_norm(config: ModelConfig, index: int, weights: WeightSource) -> torch.Tensor | None:
    """Factor of the norm of a layer's input [H], None where the family has none."""
    name = norm_names(config).before_attention
    return load_norm(f"model.layers.{index}.{name}", weights, config.norm_offset) if name else None


def build_layer(
    config: ModelConfig,
    index: int,
    next_norm: torch.Tensor | None,
    quant: QuantConfig | None,
    weights: WeightSource,
    kernels: Kernels,
    group_experts: bool = False,
) -> DecoderLayer:
    """One layer. next_norm: of the next layer's input; the last layer has none, its stream goes to the final norm. group_experts: see
    `load_moe`; calibration wants to see every expert's own linears."""
    layer, names = f"model.layers.{index}", norm_names(config)

    def norm(name: str | None) -> torch.Tensor | None:
        return load_norm(f"{layer}.{name}", weights, config.norm_offset) if name else None

    def step(post_norm: str | None, pre_norm: torch.Tensor | None) -> ResidualStep:
        return ResidualStep(norm(post_norm), config.residual_multiplier, pre_norm, config.rms_norm_eps, kernels)

    attention = _build_attention(config, index, quant, weights, kernels)
    mlp = _build_mlp(config, index, quant, weights, kernels, group_experts)
    after_attention = step(names.after_attention, norm(names.before_mlp))
    after_attention.inputs = input_format(mlp)
    return DecoderLayer(
        attention=attention,
        after_attention=after_attention,
        mlp=mlp,
        after_mlp=step(names.after_mlp, next_norm),
        rotation=config.ropes().index(config.rope_of_layer(index)),
    )


def _build_mlp(
    config: ModelConfig, index: int, quant: QuantConfig | None, weights: WeightSource, kernels: Kernels, group_experts: bool
) -> FeedForward:
    name = f"model.layers.{index}.mlp"
    if config.has_experts(index):
        return load_moe(name, config, quant, weights, kernels, group_experts)
    return load_gated_mlp(name, config.hidden_act, quant, weights, kernels)


def _build_attention(config: ModelConfig, index: int, quant: QuantConfig | None, weights: WeightSource, kernels: Kernels) -> Attention:
    name = f"model.layers.{index}.self_attn"
    norms = None
    if config.qk_norm:
        norms = load_norm(f"{name}.q_norm", weights, config.norm_offset), load_norm(f"{name}.k_norm", weights, config.norm_offset)
    head_norms = norms if norms is not None and not config.full_width_qk_norm else (None, None)
    return Attention(
        qkv_proj=load_linear([f"{name}.{p}_proj" for p in "qkv"], weights, quant, kernels),
        o_proj=load_linear([f"{name}.o_proj"], weights, quant, kernels),
        q_norm=head_norms[0],
        k_norm=head_norms[1],
        full_width_norms=norms if config.full_width_qk_norm else None,
        eps=config.rms_norm_eps,
        num_heads=config.num_heads,
        scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
        window=config.window_of_layer(index),
        softcap=config.attention_softcap or 0.0,
        kernels=kernels,
        kv_scales=load_kv_scales(config, index, weights, kernels),
    )
