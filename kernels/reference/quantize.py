"""Quantization of a linear's inputs behind the op that makes them, in plain torch: the op, rounded to its dtype as ever, then the codes."""

import torch

from dspark.kernels.quant_math import quantize_tokens, tokens_to_fp8
from dspark.kernels.quantized_rows import InputFormat, QuantizedRows
from dspark.kernels.reference.elementwise import add_rms_norm, rms_norm, silu_and_mul


def quantize_rows(x: torch.Tensor, inputs: InputFormat) -> QuantizedRows:
    """x [T, K] in a linear's format."""
    codes, scales = quantize_tokens(x) if inputs.kind == "int8" else tokens_to_fp8(x, inputs.scale)
    return QuantizedRows(codes, scales.expand(x.shape[0], 1).flatten(), x.dtype)


def rms_norm_quantize(x: torch.Tensor, weight: torch.Tensor, eps: float, inputs: InputFormat) -> QuantizedRows:
    """`rms_norm` of x [T, H] in a linear's format."""
    return quantize_rows(rms_norm(x, weight, eps), inputs)


def add_rms_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, inputs: InputFormat
) -> tuple[QuantizedRows, torch.Tensor]:
    """`add_rms_norm` with the normed rows in a linear's format: (rows, new residual)."""
    normed, summed = add_rms_norm(x, residual, weight, eps)
    return quantize_rows(normed, inputs), summed


def silu_and_mul_quantize(gate_up: torch.Tensor, inputs: InputFormat) -> QuantizedRows:
    """`silu_and_mul` of gate_up [T, 2 * I] in a linear's format."""
    return quantize_rows(silu_and_mul(gate_up), inputs)
