"""Rotary position embedding: cos and sin of every position, with the context extensions of the families.

Sources: RoPE (Su et al. 2021), linear interpolation (Chen et al. 2023), dynamic NTK (bloc97 2023), YaRN (Peng et al. 2023), Llama 3.1.
The frequencies equal those of transformers' `modeling_rope_utils` (tested).
"""

from __future__ import annotations

import math

import torch

from dspark.runtime.spec.model_config import RopeConfig


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


def _mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def attention_factor(rope: RopeConfig) -> float:
    """Factor on cos and sin (YaRN's temperature); 1 for the other kinds."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor)


class RotaryEmbedding:
    """cos and sin for positions below max_len, float32 [max_len, R / 2], R = rotated dimensions of a head.

    The dynamic kind has no fixed table: beyond the original context its base grows with the length that the sequence has when the token
    is computed, so `lookup` also takes that length per token.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_len: int, max_position: int, device: torch.device | str = "cpu") -> None:
        self.rope = rope
        self.dim = int(head_dim * rope.partial_rotary_factor)
        self.original = rope.original_max_position or max_position
        self.device = device
        inv_freq = _base_frequencies(rope.theta, self.dim)
        if rope.kind == "linear":
            inv_freq = inv_freq / rope.factor
        elif rope.kind == "llama3":
            inv_freq = _llama3(inv_freq, rope, self.original)
        elif rope.kind == "yarn":
            inv_freq = _yarn(inv_freq, rope, self.original, self.dim)
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq[None]
        factor = attention_factor(rope)
        self.cos, self.sin = (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)

    @property
    def is_dynamic(self) -> bool:
        return self.rope.kind == "dynamic"

    def cache_salt(self, prompt_len: int) -> int:
        """What a sequence's keys depend on besides its tokens (see kv.PrefixIndex.root): its prompt's length, when the base follows it."""
        return prompt_len if self.is_dynamic and prompt_len > self.original else 0

    def lookup(self, positions: torch.Tensor, lengths: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [T, R / 2] of positions int64 [T]; lengths int64 [T] (dynamic only): the sequence's length at each token."""
        if not self.is_dynamic or lengths is None or int(lengths.max()) <= self.original:
            return self.cos[positions], self.sin[positions]
        grown = self.rope.factor * lengths.double() / self.original - (self.rope.factor - 1)
        theta = self.rope.theta * grown.clamp(min=1.0) ** (self.dim / (self.dim - 2))
        exponent = torch.arange(0, self.dim, 2, dtype=torch.int64, device=positions.device).float() / self.dim
        inv_freq = 1.0 / (theta.float()[:, None] ** exponent[None])
        angles = positions.float()[:, None] * inv_freq
        return angles.cos(), angles.sin()
