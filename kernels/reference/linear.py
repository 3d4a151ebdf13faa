"""Linear layers in plain torch: dense, quantized with 16-bit activations (integers or FP8), and 8-bit integers on both sides.

A linear op is made once per layer (`make_*` re-lays the weight) and returns the function that runs it: x [T, K] -> [T, N].
"""

from collections.abc import Callable

import torch

from dspark.kernels.facts import KernelFacts
from dspark.kernels.fp8 import Fp8Weight
from dspark.kernels.int8 import Int8Weight
from dspark.kernels.quant_math import quantize_tokens, round_tokens_to_fp8
from dspark.kernels.wna16 import Wna16Weight

LinearFn = Callable[[torch.Tensor], torch.Tensor]
DETERMINISTIC_ROWS = 64
"""Rows of every product in deterministic runs. A library picks its kernel, and with it the order of additions, by the number of rows;
products of one fixed shape give every row the same bits whatever stands beside it."""


def make_dense_linear(weight: torch.Tensor, bias: torch.Tensor | None, facts: KernelFacts) -> LinearFn:
    """x @ weight [N, K].T + bias [N]."""
    return _for_run(lambda x: torch.nn.functional.linear(x, weight, bias), facts)


def _for_run(product: LinearFn, facts: KernelFacts) -> LinearFn:
    return in_fixed_tiles(product) if facts.deterministic else product


def in_fixed_tiles(product: LinearFn) -> LinearFn:
    """Run a product on tiles of DETERMINISTIC_ROWS rows, the last one filled up with zeros."""

    def tiled(x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        missing = -num_rows % DETERMINISTIC_ROWS
        filled = torch.cat([x, x.new_zeros(missing, x.shape[1])]) if missing else x
        tiles = [product(tile) for tile in filled.split(DETERMINISTIC_ROWS)] if num_rows else [product(x)]
        return tiles[0][:num_rows] if len(tiles) == 1 else torch.cat(tiles)[:num_rows]

    return tiled


def make_wna16_linear(weight: Wna16Weight, bias: torch.Tensor | None, facts: KernelFacts) -> LinearFn:
    """x @ dequantized weight.T + bias; the weight is rounded once to x's dtype, on every call."""
    stored = weight.without_perm()
    return gathering_inputs(_for_run(lambda x: torch.nn.functional.linear(x, stored.dense(x.dtype), bias), facts), weight)


def gathering_inputs(linear: LinearFn, weight: Wna16Weight) -> LinearFn:
    """A product of a weight in stored order, its inputs gathered first where that order is not their own."""
    if weight.perm is None:
        return linear
    perm = weight.perm.long()
    return lambda x: linear(x.index_select(-1, perm))


def make_fp8_linear(weight: Fp8Weight, bias: torch.Tensor | None, facts: KernelFacts) -> LinearFn:
    """x @ dequantized weight.T + bias; the weight is rounded once to x's dtype, on every call, inputs where the weight says so."""
    return rounding_inputs(_for_run(lambda x: torch.nn.functional.linear(x, weight.dense(x.dtype), bias), facts), weight, facts)


def rounding_inputs(linear: LinearFn, weight: Fp8Weight, facts: KernelFacts) -> LinearFn:
    """A product with inputs rounded to numbers of float8 where the weight says so (but see KernelFacts.exact_activations)."""
    if weight.inputs is None or facts.exact_activations:
        return linear
    scale = weight.input_scale
    return lambda x: linear(round_tokens_to_fp8(x, scale))


def make_int8_linear(weight: Int8Weight, bias: torch.Tensor | None, facts: KernelFacts) -> LinearFn:
    """Inputs quantized token by token, an exact product of integers, one multiplication by both scales.

    The product runs in float64, which holds every sum of 8-bit products exactly (K * 2**14 < 2**53) on any device.
    """
    codes, scales = weight.qweight.double().t(), weight.scales.float()

    def linear(x: torch.Tensor) -> torch.Tensor:
        quantized, token_scale = quantize_tokens(x)
        return scaled_sums(torch.mm(quantized.double(), codes), token_scale, scales, bias, x.dtype)

    return linear


def scaled_sums(
    sums: torch.Tensor, token_scale: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Sums of integer products [T, N] times the token's scale [T, 1] and the output's [N], plus bias; in float32, rounded once to dtype."""
    y = sums.float() * token_scale * scales
    return (y if bias is None else y + bias.float()).to(dtype)
