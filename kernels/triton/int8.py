"""Linears of 8-bit integers on both sides on Triton: name and signature of `kernels.reference.linear.make_int8_linear`."""

from __future__ import annotations

import torch

from dspark.kernels.facts import KernelFacts
from dspark.kernels.int8 import Int8Weight
from dspark.kernels.quantized_rows import InputFormat, QuantizedRows
from dspark.kernels.triton import gemm_tiles
from dspark.kernels.triton import launch as launcher
from dspark.kernels.triton.gemm import Product, multiply
from dspark.kernels.triton.quantize import quantize_rows

MAX_INPUTS = (1 << 17) - 1
"""A sum of so many products of 8-bit integers, 2**14 each at most, fits 32 bits."""


def supports(op: str, facts: KernelFacts) -> str | None:
    """None, or why this kernel does not take the op."""
    return launcher.decline(facts)


def make_int8_linear(weight: Int8Weight, bias: torch.Tensor | None, facts: KernelFacts) -> Int8Linear:
    """Inputs quantized token by token, an exact product of integers, scaled in float32; equal to the reference to the last bit.

    Raises ValueError for more inputs than a 32-bit sum can hold.
    """
    launcher.require(
        weight.in_features <= MAX_INPUTS, lambda: f"the Triton int8 kernel has up to {MAX_INPUTS} inputs, not {weight.in_features}"
    )
    return Int8Linear(weight, bias)


class Int8Linear:
    """x [T, K], or the same as `QuantizedRows`, -> [T, N]. A row's result depends on nothing but the row, whatever the tile."""

    takes = InputFormat("int8")

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None) -> None:
        self._weight, self._scales, self._bias = weight.qweight.contiguous(), weight.scales.float().contiguous(), bias

    def __call__(self, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        from dspark.kernels.triton.int8_kernels import int8_kernel

        rows = x if isinstance(x, QuantizedRows) else quantize_rows(x, self.takes)
        num_rows, (out_features, in_features) = rows.codes.shape[0], self._weight.shape
        out = torch.empty(num_rows, out_features, dtype=rows.dtype, device=rows.codes.device)
        product = Product(rows.codes, out, rows.scales, self._scales, self._bias, sums=torch.int32)
        multiply(int8_kernel, product, (self._weight,), gemm_tiles.bytes_tile(num_rows, out_features, in_features))
        return out
