"""Position-keyed random numbers: what is drawn depends on the request's key, the sample index and the position, on nothing else.

A row (one draw) has a 64-bit key, hashed from (draw key, sample index, position). Token v of the row gets the v-th output of a SplitMix64
generator (Steele, Lea, Flood 2014: "Fast splittable pseudorandom number generators") seeded with it, and from its upper 32 bits a number
u in (0, 1) and an exponential variate E = -log(1 - u). The Gumbel noise of the token is -log(E).
"""

from __future__ import annotations

import struct

import torch
import xxhash

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
U_MAX = 1.0 - 2.0**-24


TOKENS, ACCEPTANCE, REPLACEMENTS = 0, 1, 2
"""Streams of one position: the noise of its token; of the rejection rule, whether a draft's token is kept, and the token in its place."""


def row_key(draw_key: int, sample_index: int, position: int, stream: int = TOKENS) -> int:
    """64-bit key of one draw. draw_key: up to 128 bits; sample_index below 2**56; position: index of the drawn token in its sequence."""
    which = sample_index | stream << 56
    return xxhash.xxh3_64_intdigest(struct.pack("<QQQQ", draw_key & (2**64 - 1), draw_key >> 64, which, position))


def uniform(key: int) -> float:
    """One number in (0, 1) of a key, 53 bits: of the generator's first output."""
    mask = 2**64 - 1
    z = (key + GAMMA) & mask
    z = (z ^ z >> 30) * MIX_1 & mask
    z = (z ^ z >> 27) * MIX_2 & mask
    return (((z ^ z >> 31) >> 11) + 0.5) * 2.0**-53


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _mix(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer on int64 bit patterns (multiplication wraps; shifts are made logical by masking)."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _signed(MIX_1)
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _signed(MIX_2)
    return z ^ ((z >> 31) & (2**33 - 1))


def exponential_noise(row_keys: list[int], vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """E of every token: float32 [rows, vocab_size]. The slow clear form of what the kernels compute token by token."""
    keys = torch.tensor([_signed(key) for key in row_keys], dtype=torch.int64, device=device)[:, None]
    steps = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device)[None] * _signed(GAMMA)
    bits = (_mix(keys + steps) >> 32) & (2**32 - 1)
    u = ((bits.to(torch.float64) + 0.5) * 2.0**-32).to(torch.float32).clamp(max=U_MAX)
    return -torch.log1p(-u)
