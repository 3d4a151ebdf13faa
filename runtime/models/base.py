"""What a model family is: which tensors its checkpoints hold, and how they become a decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dspark.runtime.spec.model_config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Family:
    """One row of the family table. model_types: `model_type` of config.json. architectures: its `architectures`.

    tensors: canonical name -> shape of every dense tensor that a model of this family has.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    tensors: Callable[[ModelConfig], Shapes]


def linear_shapes(name: str, num_outputs: int, num_inputs: int, bias: bool) -> Shapes:
    """weight [N, K] and, with bias, bias [N] of a linear module."""
    shapes: Shapes = {f"{name}.weight": (num_outputs, num_inputs)}
    if bias:
        shapes[f"{name}.bias"] = (num_outputs,)
    return shapes


def decoder_tensors(config: ModelConfig) -> Shapes:
    """Tensors of a pre-norm decoder with gated feed-forward layers: the Llama layout, with the deltas that the config names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes |= linear_shapes(f"{layer}.self_attn.q_proj", q_size, hidden, config.qkv_bias)
        shapes |= linear_shapes(f"{layer}.self_attn.k_proj", kv_size, hidden, config.qkv_bias)
        shapes |= linear_shapes(f"{layer}.self_attn.v_proj", kv_size, hidden, config.qkv_bias)
        shapes |= linear_shapes(f"{layer}.self_attn.o_proj", hidden, q_size, config.attention_out_bias)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        shapes |= linear_shapes(f"{layer}.mlp.gate_proj", inner, hidden, config.mlp_bias)
        shapes |= linear_shapes(f"{layer}.mlp.up_proj", inner, hidden, config.mlp_bias)
        shapes |= linear_shapes(f"{layer}.mlp.down_proj", hidden, inner, config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
