"""8-bit numbers of a KV cache in registers: see `kernels.kv_cache` for what they stand for.

float8 (e4m3fn) comes and goes as uint8 and is taken apart by its bits, so that GPUs without that type compute the same.
"""

import triton
import triton.language as tl


@triton.jit
def unit(CACHE: tl.constexpr):
    """What 1 of `widen` stands for: float8 bits where float16 has its exponent and mantissa are the number divided by 2**8."""
    return 256.0 if CACHE == "fp8" else 1.0


@triton.jit
def widen(codes, CACHE: tl.constexpr, dtype: tl.constexpr):
    """Loaded elements in `dtype`, in units of `unit`. Exact: 8 bits fit float16 and bfloat16, subnormals too."""
    if CACHE == "fp8":
        bits = codes.to(tl.int16)
        codes = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return codes.to(dtype)


@triton.jit
def encode(x, CACHE: tl.constexpr, dtype: tl.constexpr):
    """float32 numbers, already divided by their scales, as a cache of `dtype` holds them: to nearest even, saturated, NaN as 0."""
    if CACHE == "int8":
        limited = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -127.0), 127.0)
        x = (limited + 12582912.0) - 12582912.0  # 1.5 * 2**23: the sum has no room for a fraction
    if CACHE == "fp8":
        size = tl.minimum(tl.abs(tl.where(x == x, x, 0.0)), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # multiples of 2**-9: the last bit of a float32 at 2**14
        code = tl.where(size < 0.015625, subnormal, normal)
        x = tl.where(x < 0.0, code | 0x80, code)
    return x.to(dtype)
