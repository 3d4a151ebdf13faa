"""Rotary position embedding: cos and sin of every position, with the context extensions of the families.

Sources: RoPE (Su et al. 2021), linear interpolation (Chen et al. 2023), dynamic NTK (bloc97 2023), YaRN (Peng et al. 2023), Llama 3.1,
LongRoPE (Ding et al. 2024).
The frequencies equal those of transformers' `modeling_rope_utils` (tested).
"""

from __future__ import annotations

import math

import torch

from dspark.runtime.spec.model_config import ModelConfig, RopeConfig

Rotations = list[tuple[torch.Tensor, torch.Tensor]]
"""cos and sin [T, R / 2] of a step's tokens, one pair for each rope of the model (ModelConfig.ropes)."""


def _base_frequencies(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig, original: int) -> torch.Tensor:
    """Low frequencies are divided by factor, high ones kept, those between are blended."""
    wavelength = 2 * math.pi / inv_freq
    low_wavelength, high_wavelength = original / rope.low_freq_factor, original / rope.high_freq_factor
    scaled = torch.where(wavelength > low_wavelength, inv_freq / rope.factor, inv_freq)
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = ~(wavelength < high_wavelength) & ~(wavelength > low_wavelength)
    return torch.where(between, blended, scaled)


def _yarn(inv_freq: torch.Tensor, rope: RopeConfig, original: int, dim: int) -> torch.Tensor:
    """Blend of interpolated (slow) and kept (fast) frequencies along a ramp over the dimensions."""

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return inv_freq / rope.factor * (1 - keep) + inv_freq * keep


def _longrope(factors: tuple[float, ...], theta: float, dim: int) -> torch.Tensor:
    """Every frequency is divided by a searched factor of its own."""
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponent)


def _mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def attention_factor(rope: RopeConfig, original: int) -> float:
    """Factor on cos and sin (the temperature of YaRN and LongRoPE); 1 for the other kinds."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(original))
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor)


class RotaryEmbedding:
    """cos and sin for positions below max_len, float32 [max_len, R / 2], R = rotated dimensions of a head.

    Two kinds follow the length that the sequence has when the token is computed, so `lookup` also takes that length per token: beyond the
    original context the base of the dynamic kind grows with it, and longrope changes to its long factors.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_len: int, max_position: int, device: torch.device | str = "cpu") -> None:
        self.rope = rope
        self.dim = int(head_dim * rope.partial_rotary_factor)
        self.original = rope.original_max_position or max_position
        self.max_len = max_len
        self.device = device
        inv_freq = _base_frequencies(rope.theta, self.dim)
        if rope.kind == "linear":
            inv_freq = inv_freq / rope.factor
        elif rope.kind == "llama3":
            inv_freq = _llama3(inv_freq, rope, self.original)
        elif rope.kind == "yarn":
            inv_freq = _yarn(inv_freq, rope, self.original, self.dim)
        elif rope.kind == "longrope":
            inv_freq = _longrope(rope.short_factor, rope.theta, self.dim)
        self.cos, self.sin = self._table(inv_freq, max_len)
        if rope.kind == "longrope" and max_len > self.original:
            self.long_cos, self.long_sin = self._table(_longrope(rope.long_factor, rope.theta, self.dim), max_len)

    def _table(self, inv_freq: torch.Tensor, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq[None]
        factor = attention_factor(self.rope, self.original)
        return (angles.cos() * factor).to(self.device), (angles.sin() * factor).to(self.device)

    @property
    def follows_length(self) -> bool:
        """Whether a key depends on more than its token and position."""
        return self.rope.kind in ("dynamic", "longrope")

    def cache_salt(self, prompt_len: int) -> int:
        """What a sequence's keys depend on besides its tokens (see kv.PrefixIndex.root): its prompt's length, when the base follows it;
        for longrope only whether the prompt is beyond the original context."""
        if not self.follows_length or prompt_len <= self.original:
            return 0
        return prompt_len if self.rope.kind == "dynamic" else self.original + 1

    @property
    def recompute_at(self) -> int | None:
        """Length at which a sequence must be computed anew, its salt being that length from then on: longrope's first one with other
        factors, which all its keys must have. None when there is no such length."""
        return self.original + 1 if self.rope.kind == "longrope" and self.max_len > self.original else None

    def lookup(
        self, positions: torch.Tensor, lengths: torch.Tensor | None = None, longest: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [T, R / 2] of positions int64 [T]; lengths int64 [T]: the sequence's length at each token (see `follows_length`).

        longest: the largest of them, where the host knows it; asking a device for it would wait for all its work.
        """
        if not self.follows_length or lengths is None or (int(lengths.max()) if longest is None else longest) <= self.original:
            return self.cos[positions], self.sin[positions]
        if self.rope.kind == "longrope":
            beyond = (lengths > self.original)[:, None]
            return (
                torch.where(beyond, self.long_cos[positions], self.cos[positions]),
                torch.where(beyond, self.long_sin[positions], self.sin[positions]),
            )
        grown = self.rope.factor * lengths.double() / self.original - (self.rope.factor - 1)
        theta = self.rope.theta * grown.clamp(min=1.0) ** (self.dim / (self.dim - 2))
        exponent = torch.arange(0, self.dim, 2, dtype=torch.int64, device=positions.device).float() / self.dim
        inv_freq = 1.0 / (theta.float()[:, None] ** exponent[None])
        angles = positions.float()[:, None] * inv_freq
        return angles.cos(), angles.sin()


class RotaryTables:
    """The rotary embeddings of a model's layers: one for each of `ModelConfig.ropes`, in that order."""

    def __init__(self, config: ModelConfig, max_len: int, device: torch.device | str = "cpu") -> None:
        self.tables = [RotaryEmbedding(rope, config.head_dim, max_len, config.max_position, device) for rope in config.ropes()]

    def cache_salt(self, prompt_len: int) -> int:
        """See RotaryEmbedding.cache_salt; a model has at most one rope that follows the length."""
        return max(table.cache_salt(prompt_len) for table in self.tables)

    @property
    def recompute_at(self) -> int | None:
        """See RotaryEmbedding.recompute_at."""
        return next((table.recompute_at for table in self.tables if table.recompute_at is not None), None)

    @property
    def longest_plain(self) -> int | None:
        """Length of a sequence up to which its rotations follow from its positions alone; None where they always do."""
        return min((table.original for table in self.tables if table.follows_length), default=None)

    def lookup(self, positions: torch.Tensor, lengths: torch.Tensor | None = None, longest: int | None = None) -> Rotations:
        """cos and sin of these positions, for each rope; see RotaryEmbedding.lookup."""
        return [table.lookup(positions, lengths, longest) for table in self.tables]
