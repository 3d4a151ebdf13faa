"""The architecture of a decoder in numbers: what the runtime needs to know of a model, free of any library's config class."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (half-split rotation).

    kind: one of ROPE_KINDS. factor: context extension factor. original_max_position: context the model was first trained at.
    The other fields belong to `llama3` (low/high_freq_factor) and `yarn` (beta_fast, beta_slow, mscale..., truncate).
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


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer.

    family: key of the family table in `runtime.models`. dtype: dtype of the weights and activations, as a string.
    sliding_window: number of tokens a query can see (itself included), or None; sliding_layers says for which layers it holds.
    eos_token_ids: every id that ends a text.
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

    def window_of_layer(self, layer: int) -> int | None:
        """Sliding window of one layer in tokens, or None for full attention."""
        if self.sliding_window is None:
            return None
        return self.sliding_window if not self.sliding_layers or self.sliding_layers[layer] else None

    @property
    def context_length(self) -> int:
        """Tokens the model can see: linear and dynamic rope stretch the trained context by their factor, yarn the original one."""
        rope = self.rope
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
        values["rope"] = RopeConfig(**values.get("rope", {}))
        for name in ("sliding_layers", "eos_token_ids"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)
