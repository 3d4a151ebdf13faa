"""Linears of 8-bit integers on both sides on Triton: name and signature of `kernels.reference.linear.make_int8_linear`."""

from __future__ import annotations

import torch

from dspark.kernels.facts import KernelFacts
from dspark.kernels.int8 import Int8Weight
from dspark.kernels.quantized_rows import InputFormat, QuantizedRows
from dspark.kernels.triton import launch as launcher
from dspark.kernels.triton.gemm import Product, multiply
from dspark.kernels.triton.gemm_tiles import GemmTile
from dspark.kernels.triton.quantize import quantize_rows
from dspark.kernels.triton.tuning.book import book_of
from dspark.kernels.triton.tuning.keys import ProductKind

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
    return Int8Linear(weight, bias, facts)


class Int8Linear:
    """x [T, K], or the same as `QuantizedRows`, -> [T, N]. A row's result depends on nothing but the row, whatever the tile."""

    takes = InputFormat("int8")

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None, facts: KernelFacts) -> None:
        self._weight, self._scales, self._bias = weight.qweight.contiguous(), weight.scales.float().contiguous(), bias
        self._dtype, self.weight_bytes = facts.dtype, self._weight.nbytes
        self._tiles = book_of(facts).products(int8_kind(weight.out_features, weight.in_features, facts.dtype), self)

    def __call__(self, x: torch.Tensor | QuantizedRows) -> torch.Tensor:
        rows = x if isinstance(x, QuantizedRows) else quantize_rows(x, self.takes)
        return self.multiply(rows, self._tiles[rows.codes.shape[0]])

    def sample(self, num_rows: int) -> QuantizedRows:
        """Random inputs."""
        return quantize_rows(torch.randn(num_rows, self._weight.shape[1], device=self._weight.device).to(self._dtype), self.takes)

    def multiply(self, inputs: QuantizedRows, tile: GemmTile) -> torch.Tensor:
        """The product with a tile."""
        from dspark.kernels.triton.int8_kernels import int8_kernel

        out = torch.empty(inputs.codes.shape[0], self._weight.shape[0], dtype=inputs.dtype, device=inputs.codes.device)
        product = Product(inputs.codes, out, inputs.scales, self._scales, self._bias, sums=torch.int32)
        multiply(int8_kernel, product, (self._weight,), tile)
        return out


def int8_kind(out_features: int, in_features: int, dtype: torch.dtype, num_experts: int = 0, rows: str = "") -> ProductKind:
    """What tiles of such a weight are looked up by; never fixed, since sums of integers are exact. rows: which rows experts have."""
    name = str(dtype).removeprefix("torch.")
    return ProductKind("int8", rows or "channels", out_features, in_features, name, 1, 8, 128, num_experts=num_experts)
