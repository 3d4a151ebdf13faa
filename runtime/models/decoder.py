"""The decoder that all families share: embed, layers, norm, head. Family deltas are flags of ModelConfig."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark.kernels.ops import AttentionBatch, Kernels, LinearFn
from dspark.runtime.layers.attention import Attention
from dspark.runtime.layers.linear import load_linear
from dspark.runtime.layers.mlp import GatedMLP
from dspark.runtime.layers.weights import WeightSource
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import QuantConfig

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class DecoderLayer:
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    input_norm: torch.Tensor
    attention: Attention
    post_norm: torch.Tensor
    mlp: GatedMLP


class Decoder:
    """A loaded model. forward: token ids -> hidden states; logits: hidden states of the rows that draw a token -> logits."""

    def __init__(
        self, config: ModelConfig, kernels: Kernels, embedding: torch.Tensor, layers: list[DecoderLayer], norm: torch.Tensor, head: LinearFn
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head

    def forward(
        self, token_ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, caches: KVCaches, batch: AttentionBatch, rows: torch.Tensor
    ) -> torch.Tensor:
        """token_ids int64 [T], cos and sin [T, R / 2] -> residual stream after the last layer, before the final norm, of the tokens `rows`
        (int64 [rows], ascending) [rows, H]. In the last layer the other tokens only leave their keys and values."""
        kernels, eps = self.kernels, self.config.rms_norm_eps
        residual = self.embedding[token_ids]
        hidden = kernels.rms_norm(residual, self.layers[0].input_norm, eps)
        for i, layer in enumerate(self.layers):
            hidden = layer.attention(hidden, cos, sin, caches[i], batch)
            if i + 1 == len(self.layers) and rows.shape[0] < residual.shape[0]:
                hidden, residual = hidden[rows], residual[rows]
            hidden = layer.attention.o_proj(hidden)
            hidden, residual = kernels.add_rms_norm(hidden, residual, layer.post_norm, eps)
            hidden = layer.mlp(hidden)
            if i + 1 < len(self.layers):
                hidden, residual = kernels.add_rms_norm(hidden, residual, self.layers[i + 1].input_norm, eps)
        return residual + hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Residual stream [rows, H] -> logits [rows, V]."""
        return self.head(self.kernels.rms_norm(hidden, self.norm, self.config.rms_norm_eps))


def build_decoder(config: ModelConfig, quant: QuantConfig | None, weights: WeightSource, kernels: Kernels) -> Decoder:
    """Take every tensor of the model from `weights`, layer by layer, and re-lay it for the kernels."""
    embedding = weights.take("model.embed_tokens.weight")
    layers = [_build_layer(config, i, quant, weights, kernels) for i in range(config.num_layers)]
    norm = weights.take("model.norm.weight")
    if config.tie_word_embeddings:
        head = kernels.dense_linear(embedding)
    else:
        head = load_linear(["lm_head"], weights, quant, kernels)
    return Decoder(config, kernels, embedding, layers, norm, head)


def _build_layer(config: ModelConfig, index: int, quant: QuantConfig | None, weights: WeightSource, kernels: Kernels) -> DecoderLayer:
    name = f"model.layers.{index}"
    attention = Attention(
        qkv_proj=load_linear([f"{name}.self_attn.{p}_proj" for p in "qkv"], weights, quant, kernels),
        o_proj=load_linear([f"{name}.self_attn.o_proj"], weights, quant, kernels),
        q_norm=weights.take(f"{name}.self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=weights.take(f"{name}.self_attn.k_norm.weight") if config.qk_norm else None,
        eps=config.rms_norm_eps,
        num_heads=config.num_heads,
        scale=config.head_dim**-0.5,
        window=config.window_of_layer(index),
        kernels=kernels,
    )
    mlp = GatedMLP(
        gate_up_proj=load_linear([f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"], weights, quant, kernels),
        down_proj=load_linear([f"{name}.mlp.down_proj"], weights, quant, kernels),
        kernels=kernels,
    )
    return DecoderLayer(
        input_norm=weights.take(f"{name}.input_layernorm.weight"),
        attention=attention,
        post_norm=weights.take(f"{name}.post_attention_layernorm.weight"),
        mlp=mlp,
    )
