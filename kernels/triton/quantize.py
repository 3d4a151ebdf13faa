"""Rows quantized to 8 bits on Triton, alone and behind the op that makes them: names and signatures of `kernels.reference.quantize`."""

from typing import Any

import torch

from dspark.kernels.facts import KernelFacts
from dspark.kernels.quantized_rows import InputFormat, QuantizedRows
from dspark.kernels.triton import launch as launcher
from dspark.kernels.triton import tiles

QUANTIZE_BLOCK = 4096
"""Values of a row that a program holds at a time, 16 a thread."""


def supports(op: str, facts: KernelFacts) -> str | None:
    """None, or why these kernels do not take the op."""
    return launcher.decline(facts)


def quantize_rows(x: torch.Tensor, inputs: InputFormat) -> QuantizedRows:
    """x [T, K] in a linear's format."""
    return _quantize(x, x.shape[1], inputs, "as they are")


def silu_and_mul_quantize(gate_up: torch.Tensor, inputs: InputFormat) -> QuantizedRows:
    """`silu_and_mul` of gate_up [T, 2 * I] in a linear's format."""
    return _quantize(gate_up, gate_up.shape[1] // 2, inputs, "silu and mul")


def _quantize(source: torch.Tensor, width: int, inputs: InputFormat, what: str) -> QuantizedRows:
    from dspark.kernels.triton.quantize_kernels import quantize_kernel

    source = source if source.stride(-1) == 1 else source.contiguous()
    rows, static = _empty_rows(source, width, inputs)
    block = min(QUANTIZE_BLOCK, tiles.next_power_of_two(width))
    args = source, _bytes(rows.codes), rows.scales, static, width, source.stride(0)
    config = {"KIND": inputs.kind, "SOURCE": what, "BLOCK": block, "num_warps": min(tiles.row_warps(block), 8)}
    launcher.launch(quantize_kernel, (source.shape[0],), *args, **config, enable_fp_fusion=False)
    return rows


def rms_norm_quantize(x: torch.Tensor, weight: torch.Tensor, eps: float, inputs: InputFormat) -> QuantizedRows:
    """`rms_norm` of x [T, H] in a linear's format."""
    return _norm_quantize(x, None, weight, eps, inputs)


def add_rms_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, inputs: InputFormat
) -> tuple[QuantizedRows, torch.Tensor]:
    """residual += x, in place and rounded to its dtype; returns (rms_norm(residual) in a linear's format, residual). x, residual [T, H]."""
    launcher.require(residual.stride(-1) == 1, lambda: f"the residual's rows must be contiguous, strides are {residual.stride()}")
    return _norm_quantize(x, residual, weight, eps, inputs), residual


def _norm_quantize(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, inputs: InputFormat) -> QuantizedRows:
    from dspark.kernels.triton.quantize_kernels import norm_quantize_kernel

    x = x if x.stride(-1) == 1 else x.contiguous()
    num_tokens, hidden = x.shape
    rows, static = _empty_rows(x, hidden, inputs)
    stream = x if residual is None else residual
    block = tiles.next_power_of_two(hidden)
    config: dict[str, Any] = {"ADD": residual is not None, "KIND": inputs.kind, "BLOCK": block, "num_warps": tiles.row_warps(block)}
    args = x, stream, weight, _bytes(rows.codes), rows.scales, static, hidden, x.stride(0), stream.stride(0), eps
    launcher.launch(norm_quantize_kernel, (num_tokens,), *args, **config, enable_fp_fusion=False)
    return rows


def _empty_rows(source: torch.Tensor, width: int, inputs: InputFormat) -> tuple[QuantizedRows, torch.Tensor]:
    """(rows to be written, the static scale or a tensor that is not read)."""
    num_tokens = source.shape[0]
    code_dtype = torch.int8 if inputs.kind == "int8" else torch.float8_e4m3fn
    codes = torch.empty(num_tokens, width, dtype=torch.uint8, device=source.device).view(code_dtype)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=source.device)
    return QuantizedRows(codes, scales, source.dtype), scales if inputs.scale is None else inputs.scale


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    """float8 goes by its bits: GPUs before 8.9 have no such type."""
    return codes if codes.dtype == torch.int8 else codes.view(torch.uint8)
