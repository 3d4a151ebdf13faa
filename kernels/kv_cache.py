"""Keys and values in 8 bits.

A cache of int8 or float8 (e4m3fn) numbers holds x / scale, rounded to nearest even and limited to what the type holds; it is read as
number * scale. Scales are known before a run: one for each key/value head and channel, or the same along a head. Along the inner loops
of attention they are constants, so those only widen 8-bit numbers: a query is multiplied by the scales of the keys before its dot
products, a result by those of the values after its sum.
"""

from dataclasses import dataclass

import torch

INT8_LIMIT = 127.0
FP8_LIMIT = 448.0
CODE_LIMITS = {torch.int8: INT8_LIMIT, torch.float8_e4m3fn: FP8_LIMIT}
"""8-bit cache dtype -> its largest number. int8 leaves -128 out, so that a number and its negative are held alike."""


@dataclass(frozen=True)
class KVScales:
    """Scales of one layer's 8-bit cache: k and v float32 [num_kv_heads, D], positive and contiguous, on the cache's device."""

    k: torch.Tensor
    v: torch.Tensor


def to_codes(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [..., num_kv_heads, D] as an 8-bit cache of this dtype holds it. Numbers beyond its limit saturate, NaN becomes 0."""
    limit = CODE_LIMITS[dtype]
    scaled = torch.nan_to_num(x.float() / scale, nan=0.0).clamp(-limit, limit)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype)


def from_codes(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_codes`, float32."""
    return codes.float() * scale
