"""The arithmetic of quantization: scale, zero point, rounding. Used by references, quantizers and tests."""

import torch

from dspark.kernels.packing import unpack_codes


def group_range(groups: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of each group (last dimension), widened to hold zero; mirrored when symmetric."""
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        bound = torch.maximum(-low, high)
        return -bound, bound
    return low, high


def scale_and_zero(low: torch.Tensor, high: torch.Tensor, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Step size and zero point (as floats) that map [low, high] onto the codes 0 .. 2**bits - 1. A group of zeros gets scale 1."""
    max_code = 2**bits - 1
    scale = (high - low) / max_code
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    zero = torch.full_like(scale, 2.0 ** (bits - 1)) if symmetric else torch.round(-low / scale).clamp(0, max_code)
    return scale, zero


def quantize_groups(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes (float, whole numbers) of groups [..., g] for scale and zero [...]."""
    return torch.round(groups / scale[..., None] + zero[..., None]).clamp(0, 2**bits - 1)


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


INT8_STEPS = 127.5
"""Steps of an activation's scale on each side of zero: the range -128 .. 127 has 255 steps (compressed-tensors' rule)."""


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [T, K] -> int8 [T, K] and scale float32 [T, 1] with x = code * scale: one scale for each token, zero at zero.

    Ties round to even; the largest value itself falls on 127.5 and is cut to 127. A token of zeros gets scale 1.
    """
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / INT8_STEPS
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.round(x / scale).clamp_(-128, 127).to(torch.int8), scale
