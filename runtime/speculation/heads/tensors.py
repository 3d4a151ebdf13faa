"""The tensors of a drafting head: canonical name -> shape. Standard library only.

Names are those of DeepSpec's checkpoints without a prefix; EAGLE-3's one layer is `layers.0`, whatever a packaging calls it.
"""

from __future__ import annotations

from dspark.runtime.models.base import Shapes, gated_mlp_tensors, linear_shapes
from dspark.runtime.speculation.heads.config import DraftConfig

TARGET_OFFSETS = "d2t"
"""int64 [draft vocabulary]: what is added to a draft token's id to get the target's id of it."""


def draft_tensors(config: DraftConfig) -> Shapes:
    """Every tensor that a head of this configuration has, in order of use."""
    hidden, vocab = config.model.hidden_size, config.model.vocab_size
    shapes: Shapes = {}
    if config.own_embedding:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (len(config.taps) * config.target_hidden_size,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{tap}.weight": (config.target_hidden_size,) for tap in range(len(config.taps))}
    shapes["fc.weight"] = (hidden, len(config.taps) * config.target_hidden_size)
    shapes |= _eagle_layer(config) if config.method == "eagle3" else _block_layers(config)
    shapes["norm.weight"] = (hidden,)
    if config.own_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, hidden)
    if config.has_own_vocabulary:
        shapes[TARGET_OFFSETS] = (config.draft_vocab_size,)
    return shapes | _markov(config) | _confidence(config)


def _attention(config: DraftConfig, layer: str, num_inputs: int) -> Shapes:
    model, name = config.model, f"{layer}.self_attn"
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes = linear_shapes(f"{name}.q_proj", q_size, num_inputs, model.qkv_bias)
    shapes |= linear_shapes(f"{name}.k_proj", kv_size, num_inputs, model.qkv_bias)
    shapes |= linear_shapes(f"{name}.v_proj", kv_size, num_inputs, model.qkv_bias)
    shapes |= linear_shapes(f"{name}.o_proj", model.hidden_size, q_size, model.attention_out_bias)
    if model.qk_norm:
        shapes |= {f"{name}.q_norm.weight": (model.head_dim,), f"{name}.k_norm.weight": (model.head_dim,)}
    return shapes


def _norms(config: DraftConfig, layer: str, *names: str) -> Shapes:
    return {f"{layer}.{name}.weight": (config.model.hidden_size,) for name in names}


def _block_layers(config: DraftConfig) -> Shapes:
    model = config.model
    shapes: Shapes = {"hidden_norm.weight": (model.hidden_size,)}
    for index in range(model.num_layers):
        layer = f"layers.{index}"
        shapes |= _norms(config, layer, "input_layernorm") | _attention(config, layer, model.hidden_size)
        shapes |= _norms(config, layer, "post_attention_layernorm") | gated_mlp_tensors(model, f"{layer}.mlp", model.intermediate_size)
    return shapes


def _eagle_layer(config: DraftConfig) -> Shapes:
    """Its projections read the token's embedding and the feature side by side."""
    model, layer = config.model, "layers.0"
    shapes = _norms(config, layer, "input_layernorm", "hidden_norm") | _attention(config, layer, 2 * model.hidden_size)
    return shapes | _norms(config, layer, "post_attention_layernorm") | gated_mlp_tensors(model, f"{layer}.mlp", model.intermediate_size)


def _markov(config: DraftConfig) -> Shapes:
    if config.markov is None:
        return {}
    hidden, rank = config.model.hidden_size, config.markov_rank
    shapes: Shapes = {
        "markov_head.markov_w1.weight": (config.model.vocab_size, rank),
        "markov_head.markov_w2.weight": (config.draft_vocab_size, rank),
    }
    if config.markov == "gated":
        shapes |= linear_shapes("markov_head.gate_proj", rank, hidden + rank, bias=True)
    if config.markov == "rnn":
        shapes |= linear_shapes("markov_head.joint_proj", 3 * rank, 2 * rank + hidden, bias=True)
    return shapes


def _confidence(config: DraftConfig) -> Shapes:
    if not config.confidence:
        return {}
    inputs = config.model.hidden_size + (config.markov_rank if config.confidence_with_markov else 0)
    return linear_shapes("confidence_head.proj", 1, inputs, bias=True)
