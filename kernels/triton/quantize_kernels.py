"""Jitted quantization of rows to 8 bits, alone and behind the op that makes them: `quant_math`'s rules, to the last bit.

To be launched with enable_fp_fusion=False: a product and the sum that rounds it, or that follows it, must not become one operation.
"""

import triton
import triton.language as tl

from dspark.kernels.triton.codes_kernels import encode


@triton.jit
def magnitude_bits(x, mask):
    """The bits of the largest magnitude of float32 values as an integer, where NaN is above infinity and both are above numbers."""
    return tl.max(tl.where(mask, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), axis=0)


@triton.jit
def row_steps(bits, static_scale, KIND: tl.constexpr):
    """(scale, what `encoded` divides or multiplies by) of a row whose largest magnitude has these bits.

    KIND: "int8", "fp8" (a scale of its own) or "fp8 static". A row that is not finite gets scale NaN, so that all its outputs are NaN.
    """
    largest = bits.to(tl.float32, bitcast=True)
    finite = bits < 0x7F800000
    nan = float("nan")
    if KIND == "int8":
        usable = finite & (largest >= 7.888609052210118e-31)  # 2**-100
        safe = tl.where(usable, largest, 1.0)
        step = tl.where(usable, tl.div_rn(127.5, safe), 0.0)
        scale = tl.where(usable, tl.div_rn(safe, 127.5), 1.0)
    elif KIND == "fp8":
        scale = tl.div_rn(tl.where(finite, largest, 0.0), 448.0)
        scale = tl.where(scale > 0.0, scale, 1.0)
        step = scale
    else:
        scale = static_scale
        step = scale
        finite = bits <= 0x7F800000  # an infinite value is cut as every large one is
    return tl.where(finite, scale, nan), step


@triton.jit
def encoded(x, step, KIND: tl.constexpr):
    """Codes of float32 values: int8, or float8 as uint8."""
    if KIND == "int8":
        rounded = (x * step + 12582912.0) - 12582912.0  # 1.5 * 2**23: the sum has no room for a fraction, ties go to even
        finite = tl.where(step > 0.0, rounded, 0.0)
        codes = tl.minimum(tl.maximum(finite, -128.0), 127.0).to(tl.int8)
    else:
        codes = encode(tl.div_rn(x, step), "fp8", tl.uint8)
    return codes


@triton.jit
def activated(source_ptr, row, cols, width, stride, mask, SOURCE: tl.constexpr):
    """The values of a row that are quantized, in float32 and rounded to their dtype: x, or silu(gate) * up of both side by side."""
    at = source_ptr + row * stride + cols
    x = tl.load(at, mask=mask, other=0.0)
    if SOURCE == "silu and mul":
        gate = x.to(tl.float32)
        up = tl.load(at + width, mask=mask, other=0.0).to(tl.float32)
        x = (gate / (1.0 + tl.exp(-gate)) * up).to(source_ptr.dtype.element_ty)
    return x.to(tl.float32)


@triton.jit
def quantize_kernel(
    source_ptr, codes_ptr, scales_ptr, static_ptr, width, stride, KIND: tl.constexpr, SOURCE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program a row of `width` results, twice over blocks of it: the largest, then the codes. The second time it comes from L2."""
    row = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, BLOCK)
    bits = 0
    for start in range(0, width, BLOCK):
        mask = start + inner < width
        x = activated(source_ptr, row, start + inner, width, stride, mask, SOURCE)
        bits = tl.maximum(bits, magnitude_bits(x, mask))
    static_scale = tl.load(static_ptr) if KIND == "fp8 static" else 1.0
    scale, step = row_steps(bits, static_scale, KIND)
    for start in range(0, width, BLOCK):
        mask = start + inner < width
        x = activated(source_ptr, row, start + inner, width, stride, mask, SOURCE)
        tl.store(codes_ptr + row * width + start + inner, encoded(x, step, KIND), mask=mask)
    tl.store(scales_ptr + row, scale)


@triton.jit
def norm_quantize_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    codes_ptr,
    scales_ptr,
    static_ptr,
    hidden,
    x_stride,
    residual_stride,
    eps,
    ADD: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row: with ADD residual += x, in place; then the norm of that row (of x without ADD), rounded to its dtype, as codes."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < hidden
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        residual_at = residual_ptr + row * residual_stride + cols
        summed = (tl.load(residual_at, mask=mask, other=0.0).to(tl.float32) + x).to(residual_ptr.dtype.element_ty)
        tl.store(residual_at, summed, mask=mask)
        x = summed.to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    normed = (x * inverse_rms * weight).to(x_ptr.dtype.element_ty).to(tl.float32)
    static_scale = tl.load(static_ptr) if KIND == "fp8 static" else 1.0
    scale, step = row_steps(magnitude_bits(normed, mask), static_scale, KIND)
    tl.store(codes_ptr + row * hidden + cols, encoded(normed, step, KIND), mask=mask)
    tl.store(scales_ptr + row, scale)
