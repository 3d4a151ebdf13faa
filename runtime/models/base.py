"""What a model family is: how its `config.json` reads, which tensors its checkpoints hold, and how they become a decoder.

Standard library only. The engine's tensor names are Hugging Face's of the Llama family; what differs between families is which exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dspark.runtime.spec.model_config import ModelConfig

Shapes = dict[str, tuple[int, ...]]
HFConfig = dict[str, Any]


@dataclass(frozen=True)
class Defaults:
    """What the transformers 5 configuration class of a family assumes for absent keys.

    num_kv_heads None: as many as query heads; head_dim None: hidden size / heads.
    """

    max_position: int = 2048
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    pad_token_id: int | None = None


def _no_keys(model: ModelConfig) -> HFConfig:
    return {}


@dataclass(frozen=True)
class Family:
    """One row of the family table: everything that a model family differs in.

    name: `model_type` of config.json and ModelConfig.family. architecture: its `architectures`.
    read: (config.json, the ModelConfig fields known so far) -> ModelConfig fields that this family derives. Keys that are read must stand
    in `hf_values`, which has checked them. write: the keys of config.json that `read` derives its fields from.
    tensors: canonical name -> shape of every dense tensor that a model of this family has.
    fused: modules that checkpoints of this family hold as one, the parts stacked along their outputs: name below the layer -> its parts.
    saved_as: name of a tensor or module of ours -> its name in checkpoints of this family, where that is another.
    """

    name: str
    architecture: str
    read: Callable[[HFConfig, dict[str, Any]], dict[str, Any]]
    write: Callable[[ModelConfig], HFConfig] = _no_keys
    defaults: Defaults = Defaults()
    tensors: Callable[[ModelConfig], Shapes] = field(default=lambda config: decoder_tensors(config))
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    saved_as: Callable[[str], str] = str


@dataclass(frozen=True)
class NormNames:
    """Names below a layer of the norms around its two blocks, None where there is none."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


def norm_names(config: ModelConfig) -> NormNames:
    """Checkpoints call the norm before the feed-forward layer `post_attention_layernorm` where it is the only one between the blocks."""
    if not config.post_norms:
        return NormNames("input_layernorm", None, "post_attention_layernorm", None)
    before = ("input_layernorm", "pre_feedforward_layernorm") if config.pre_norms else (None, None)
    return NormNames(before[0], "post_attention_layernorm", before[1], "post_feedforward_layernorm")


def linear_shapes(name: str, num_outputs: int, num_inputs: int, bias: bool) -> Shapes:
    """weight [N, K] and, with bias, bias [N] of a linear module."""
    shapes: Shapes = {f"{name}.weight": (num_outputs, num_inputs)}
    if bias:
        shapes[f"{name}.bias"] = (num_outputs,)
    return shapes


def gated_mlp_tensors(config: ModelConfig, name: str, inner: int) -> Shapes:
    """Tensors of a gated feed-forward block, `inner` wide."""
    hidden = config.hidden_size
    shapes = linear_shapes(f"{name}.gate_proj", inner, hidden, config.mlp_bias)
    shapes |= linear_shapes(f"{name}.up_proj", inner, hidden, config.mlp_bias)
    return shapes | linear_shapes(f"{name}.down_proj", hidden, inner, config.mlp_bias)


def moe_tensors(config: ModelConfig, name: str) -> Shapes:
    """Tensors of a mixture of experts: the router, each expert, and the expert that all tokens share with its own gate."""
    hidden = config.hidden_size
    shapes = linear_shapes(f"{name}.gate", config.num_experts, hidden, False)
    for expert in range(config.num_experts):
        shapes |= gated_mlp_tensors(config, f"{name}.experts.{expert}", config.moe_intermediate_size)
    if config.shared_expert_intermediate_size:
        shapes |= linear_shapes(f"{name}.shared_expert_gate", 1, hidden, False)
        shapes |= gated_mlp_tensors(config, f"{name}.shared_expert", config.shared_expert_intermediate_size)
    return shapes


def decoder_tensors(config: ModelConfig) -> Shapes:
    """Tensors of a decoder in the Llama layout, with the deltas that the config names, in order of use."""
    hidden, norms = config.hidden_size, norm_names(config)
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

    def norm(layer: str, name: str | None) -> Shapes:
        return {f"{layer}.{name}.weight": (hidden,)} if name else {}

    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes |= norm(layer, norms.before_attention)
        shapes |= linear_shapes(f"{layer}.self_attn.q_proj", q_size, hidden, config.qkv_bias)
        shapes |= linear_shapes(f"{layer}.self_attn.k_proj", kv_size, hidden, config.qkv_bias)
        shapes |= linear_shapes(f"{layer}.self_attn.v_proj", kv_size, hidden, config.qkv_bias)
        shapes |= linear_shapes(f"{layer}.self_attn.o_proj", hidden, q_size, config.attention_out_bias)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (q_size if config.full_width_qk_norm else config.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (kv_size if config.full_width_qk_norm else config.head_dim,)
        shapes |= norm(layer, norms.after_attention) | norm(layer, norms.before_mlp)
        dense = not config.has_experts(i)
        shapes |= gated_mlp_tensors(config, f"{layer}.mlp", config.intermediate_size) if dense else moe_tensors(config, f"{layer}.mlp")
        shapes |= norm(layer, norms.after_mlp)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def attention_bias(config: HFConfig) -> dict[str, Any]:
    """`attention_bias`: biases on all four projections."""
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "attention_out_bias": bias}


def all_biases(config: HFConfig) -> dict[str, Any]:
    """`attention_bias` and `mlp_bias`."""
    return {**attention_bias(config), "mlp_bias": bool(config.get("mlp_bias", False))}
