"""The arithmetic of quantization: scale, zero point, rounding. Used by references, quantizers and tests."""

import torch

from dspark.kernels.packing import unpack_codes


def group_range(low: torch.Tensor, high: torch.Tensor, symmetric: bool, mirror_always: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The range that a group's codes must reach, from its smallest and largest value: it holds zero, and is mirrored when symmetric.

    A group of zeros gets -1 to 1. mirror_always False is AutoGPTQ's rule: a group without negative values is not mirrored, and what lies
    above the symmetric codes' upper half is cut.
    """
    low, high = low.clamp(max=0), high.clamp(min=0)
    if symmetric:
        bound = torch.maximum(-low, high)
        low, high = (-bound if mirror_always else torch.where(low < 0, -bound, low)), bound
    empty = (low == 0) & (high == 0)
    return low.masked_fill(empty, -1.0), high.masked_fill(empty, 1.0)


def zero_point(low: torch.Tensor, scale: torch.Tensor, bits: int, symmetric: bool) -> torch.Tensor:
    """The code that stands for zero (a float): in the middle when symmetric, else where it lets the codes begin nearest to `low`."""
    if symmetric:
        return torch.full_like(scale, 2.0 ** (bits - 1))
    return torch.round(-low / scale).clamp_(0, 2**bits - 1)


def round_to_codes(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes (floats, whole numbers): round(weight / scale) + zero, ties to even, cut to 0 .. 2**bits - 1. Shapes broadcast."""
    return torch.round(weight / scale).add_(zero).clamp_(0, 2**bits - 1)


def dequantize_wna16(
    qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, in_features: int, dtype: torch.dtype
) -> torch.Tensor:
    """Dense weight [N, K] of the canonical storage (see `runtime.spec.quant`); computed in float32, rounded once to dtype."""
    codes = unpack_codes(qweight, bits, in_features).float()  # [K, N]
    num_groups = scales.shape[0]
    group_size = in_features // num_groups
    zero = zeros.float() if zeros is not None else torch.full_like(scales, 2.0 ** (bits - 1), dtype=torch.float32)
    grouped = codes.view(num_groups, group_size, -1)
    weight = (grouped - zero[:, None]) * scales.float()[:, None]
    return weight.view(in_features, -1).t().to(dtype).contiguous()


def dequantize_blocks(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Dense weight [N, K] of numbers [N, K] with one scale for each block of (outputs, inputs), -1 meaning all of them.

    Computed in float32, rounded once to dtype. Raises ValueError when the scales do not fit the blocks.
    """
    out_features, in_features = codes.shape
    rows = out_features if block[0] == -1 else block[0]
    cols = in_features if block[1] == -1 else block[1]
    if tuple(scales.shape) != (-(-out_features // rows), -(-in_features // cols)):
        raise ValueError(f"scales {list(scales.shape)} do not fit blocks of {rows} x {cols} in a weight {[out_features, in_features]}")
    wide = scales.float()
    if rows != 1:
        wide = wide.repeat_interleave(rows, 0)[:out_features]
    if cols != in_features:
        wide = wide.repeat_interleave(cols, 1)[:, :in_features]
    return (codes.float() * wide).to(dtype)


FP8_MAX = 448.0
"""Largest number of float8 e4m3fn."""


def tokens_to_fp8(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [T, K] -> float8 (e4m3fn) [T, K] and scale float32 [T, 1], or the given one, with x = code * scale.

    scale float32 [] for all, beyond 448 of which they are cut; None gives each token its own, its largest value over 448 (1 for a token of
    zeros).
    """
    wide = x.float()
    if scale is None:
        scale = wide.abs().amax(-1, keepdim=True) / FP8_MAX
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (wide / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def round_tokens_to_fp8(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Activations [T, K] -> the same rounded to numbers of float8 times a scale, in their own dtype; see `tokens_to_fp8`."""
    codes, scale = tokens_to_fp8(x, scale)
    return (codes.float() * scale).to(x.dtype)


INT8_STEPS = 127.5
"""Steps of an activation's scale on each side of zero: the range -128 .. 127 has 255 steps (compressed-tensors' rule)."""
SMALLEST_TOKEN = 2.0**-100
"""A token whose values are all smaller counts as zeros: the inverse of its step would leave float32."""


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [T, K] -> int8 [T, K] and scale float32 [T, 1] with x = code * scale: one scale for each token, zero at zero.

    code = round(x * (127.5 / largest)): a product, not a quotient, since that is the same number on every device. Ties round to even; the
    largest value falls on 127.5 and is cut to 127. A token of zeros gets scale 1. One with a value that is not finite gets scale NaN, and
    its outputs are NaN too.
    """
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    usable = (largest >= SMALLEST_TOKEN) & largest.isfinite()
    codes = torch.round(x * (torch.full_like(largest, INT8_STEPS) / largest)).clamp_(-128, 127)  # a true quotient
    without = torch.where(largest < SMALLEST_TOKEN, 1.0, torch.nan)
    return torch.where(usable, codes, 0.0).to(torch.int8), torch.where(usable, largest / INT8_STEPS, without)
