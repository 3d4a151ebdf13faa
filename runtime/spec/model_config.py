"""The architecture of a decoder in numbers: what the runtime needs to know of a model, free of any library's config class."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (half-split rotation).

    kind: one of ROPE_KINDS. factor: context extension factor. original_max_position: context the model was first trained at.
    The other fields belong to `llama3` (low/high_freq_factor), `yarn` (beta_fast, beta_slow, mscale..., truncate) and `longrope`
    (short_factor, long_factor: what divides the frequency of each rotated pair, up to and beyond the original context).
    partial_rotary_factor: share of a head's dimensions that is rotated, 0 for none.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RopeConfig:
        """Inverse of `asdict`."""
        lists = {name: tuple(data.get(name, ())) for name in ("short_factor", "long_factor")}
        return cls(**{**data, **lists})


NO_ROPE = RopeConfig(partial_rotary_factor=0.0)
"""The rope of a layer without position embedding (NoPE)."""


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer.

    family: key of the family table in `runtime.models`. dtype: dtype of the weights and activations, as a string.
    sliding_window: number of tokens a query can see (itself included), or None; sliding_layers says for which layers it holds.
    eos_token_ids: every id that ends a text.

    pre_norms, post_norms: an RMS norm before each block, and one on its result before that is added to the residual stream.
    norm_offset: norms multiply by 1 + weight. full_width_qk_norm: with qk_norm, one norm over all heads of q and one over all of k.
    attention_scale: factor on the scores, None for head_dim ** -0.5. *_softcap c: values become c * tanh(value / c).
    embedding_multiplier: factor on the embedding rows; round_embedding_multiplier: rounded to the weights' dtype before.
    local_rope: rope of the sliding layers where it is another one. rope_layers: which layers rotate at all, empty for all.

    num_experts: of a mixture-of-experts layer, 0 for a model without; each token takes experts_per_token of them, all of one width,
    moe_intermediate_size. norm_topk_prob: the shares of those taken add up to 1. shared_expert_intermediate_size: width of the expert that
    every token takes besides, 0 for none. sparse_layers: which layers have experts (the others are plain), empty for all.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: bool = False
    full_width_qk_norm: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    logits_divisor: float = 1.0
    embedding_multiplier: float = 1.0
    round_embedding_multiplier: bool = False
    residual_multiplier: float = 1.0
    local_rope: RopeConfig | None = None
    rope_layers: tuple[bool, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = False
    sparse_layers: tuple[bool, ...] = ()

    def has_experts(self, layer: int) -> bool:
        """Whether one layer's feed-forward block is a mixture of experts."""
        return self.num_experts > 0 and (not self.sparse_layers or self.sparse_layers[layer])

    def window_of_layer(self, layer: int) -> int | None:
        """Sliding window of one layer in tokens, or None for full attention."""
        if self.sliding_window is None:
            return None
        return self.sliding_window if not self.sliding_layers or self.sliding_layers[layer] else None

    def rope_of_layer(self, layer: int) -> RopeConfig:
        """Rope of one layer, NO_ROPE where it has none."""
        if self.rope_layers and not self.rope_layers[layer]:
            return NO_ROPE
        return self.local_rope if self.local_rope is not None and self.window_of_layer(layer) is not None else self.rope

    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct ropes of the layers, in order of first use."""
        return tuple(dict.fromkeys(self.rope_of_layer(layer) for layer in range(self.num_layers)))

    @property
    def context_length(self) -> int:
        """Tokens the model can see: linear and dynamic rope stretch the trained context by their factor, yarn the original one.

        A model with a local rope (Gemma 3) states the stretched context itself, and so does longrope.
        """
        rope = self.rope
        if self.local_rope is not None:
            return self.max_position
        if rope.kind in ("linear", "dynamic"):
            return int(self.max_position * rope.factor)
        if rope.kind == "yarn" and rope.original_max_position:
            return max(self.max_position, int(rope.original_max_position * rope.factor))
        return self.max_position

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelConfig:
        """Inverse of `to_json`. Raises TypeError for an unknown or missing key (a newer schema is refused before this)."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise TypeError(f"unknown model keys {unknown}")
        values = dict(data)
        values["rope"] = RopeConfig.from_json(values.get("rope", {}))
        if values.get("local_rope") is not None:
            values["local_rope"] = RopeConfig.from_json(values["local_rope"])
        for name in ("sliding_layers", "rope_layers", "sparse_layers", "eos_token_ids"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)
