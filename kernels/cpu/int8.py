"""Products of 8-bit integers on both sides (W8A8): inputs are quantized, multiplied exactly, and scaled, in two compiled passes.

A step of few rows is bound by reading the weights, which are half of bfloat16's; the inner loops (`blocks`) keep memory busy while
they compute. Sums of integers do not depend on their order, so a row's result depends on nothing but the row: no fixed tiles are needed
in deterministic runs, and any number of rows runs without a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import get_num_threads, njit, prange

from dspark.kernels.cpu.avx2_blocks import has_wide_floats
from dspark.kernels.cpu.avx2_panels import product_pairs
from dspark.kernels.cpu.blocks import (
    AMX_ROWS,
    BLOCK_OUTPUTS,
    DOT_ROWS,
    STEP_BYTES,
    SUMS_BYTES,
    amx_int8,
    configure_tiles,
    dot_int8,
    has_int8_dots,
    has_int8_tiles,
    release_tiles,
    tile_shapes,
)
from dspark.kernels.cpu.int8_rows import finish_rows, quantize_row
from dspark.kernels.cpu.llvm import LINE_BYTES, address
from dspark.kernels.cpu.pages import moved_to_large_pages
from dspark.kernels.cpu.rows import empty_rows
from dspark.kernels.cpu.views import KINDS, matrix
from dspark.kernels.facts import KernelFacts
from dspark.kernels.int8 import Int8Weight
from dspark.kernels.quant_math import quantize_tokens
from dspark.kernels.reference.linear import LinearFn, scaled_sums

SERIAL_ELEMENTS = 32768
"""Up to so many inputs are quantized on the calling thread."""
MAX_INPUTS = (1 << 17) - 1
"""A sum of so many products of 8-bit integers, 2**14 each at most, fits 32 bits."""
EXACT_INPUTS = 1 << 10
"""A sum of so many products is exact in float32, 24 bits."""


def supports(op: str, facts: KernelFacts) -> str | None:
    if facts.dtype not in (torch.float32, torch.bfloat16):
        return f"is made for float32 and bfloat16, the dtype is {str(facts.dtype).removeprefix('torch.')}"
    return None


@njit(cache=True, nogil=True, error_model="numpy")
def _scratch(num_rows, row_bytes, num_workers):
    """Room for the codes (rows filled up to whole tiles), the rows' steps and each worker's sums, which begin on cache lines: a tile that
    does not takes twice as long to load."""
    filled = -(-num_rows // AMX_ROWS) * AMX_ROWS
    code_bytes, scale_bytes = filled * row_bytes, 4 * filled
    room = np.empty(code_bytes + scale_bytes + num_workers * SUMS_BYTES + LINE_BYTES, np.uint8)
    room = room[-address(room) % LINE_BYTES :]
    codes = room[:code_bytes].reshape(filled, row_bytes)
    row_scales = room[code_bytes : code_bytes + scale_bytes].view(np.float32)
    sums = room[code_bytes + scale_bytes : code_bytes + scale_bytes + num_workers * SUMS_BYTES].view(np.int32)
    return codes, row_scales, sums


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _quantize(x, zero_point, codes, row_scales):
    if x.size <= SERIAL_ELEMENTS:
        for row in range(x.shape[0]):
            quantize_row(x, row, zero_point, codes, row_scales)
    else:
        for row in prange(x.shape[0]):
            quantize_row(x, row, zero_point, codes, row_scales)


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _product_amx(
    kind, x_at, num_rows, inputs, out_at, outputs, weight, row_bytes, corrections, scales, bias, shapes, num_workers
):  # fmt: skip
    """Inputs [M, K] and outputs [M, N] of the same kind, by address (see `views.matrix`). weight: int8, flat panels of rows filled up to
    row_bytes. corrections, scales, bias: [N filled up to blocks], or empty for none. shapes: see `tile_shapes`."""
    out, num_blocks = matrix(kind, out_at, num_rows, outputs), scales.shape[0] // BLOCK_OUTPUTS
    codes, row_scales, sums = _scratch(num_rows, row_bytes, num_workers)
    _quantize(matrix(kind, x_at, num_rows, inputs), np.int32(0), codes, row_scales)
    x, steps, panel_bytes = codes.reshape(-1), row_bytes // STEP_BYTES, 16 * row_bytes
    for worker in prange(num_workers):
        scratch, last = worker * SUMS_BYTES, (worker + 1) * num_blocks // num_workers
        configure_tiles(shapes)
        for block in range(worker * num_blocks // num_workers, last):
            offset = block * 2 * panel_bytes
            ahead = offset + 2 * panel_bytes if block + 1 < last else offset
            for row in range(0, num_rows, AMX_ROWS):
                amx_int8(row, num_rows, x, row_bytes, steps, weight, offset, panel_bytes, ahead, 0, sums, scratch)
                finish_rows(sums, scratch // 4, row, min(AMX_ROWS, num_rows - row), row_scales, corrections, scales, bias, block, out)
        release_tiles()


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _product_vnni(
    kind, x_at, num_rows, inputs, out_at, outputs, weight, row_bytes, corrections, scales, bias, shapes, num_workers
):  # fmt: skip
    """The same without tiles."""
    out, num_blocks = matrix(kind, out_at, num_rows, outputs), scales.shape[0] // BLOCK_OUTPUTS
    codes, row_scales, sums = _scratch(num_rows, row_bytes, num_workers)
    _quantize(matrix(kind, x_at, num_rows, inputs), np.int32(128), codes, row_scales)
    x, steps, panel_bytes = codes.reshape(-1), row_bytes // STEP_BYTES, 16 * row_bytes
    for worker in prange(num_workers):
        scratch, last = worker * SUMS_BYTES, (worker + 1) * num_blocks // num_workers
        for block in range(worker * num_blocks // num_workers, last):
            offset = block * 2 * panel_bytes
            ahead = offset + 2 * panel_bytes if block + 1 < last else offset
            for row in range(0, num_rows, DOT_ROWS):
                dot_int8(row, num_rows, x, row_bytes, steps, weight, offset, panel_bytes, ahead, 0, sums, scratch)
                finish_rows(sums, scratch // 4, row, min(DOT_ROWS, num_rows - row), row_scales, corrections, scales, bias, block, out)


def vector_product() -> Callable[..., None] | None:
    """The product that this CPU has instructions for, or None."""
    if has_int8_tiles():
        return _product_amx
    if has_int8_dots():
        return _product_vnni
    return product_pairs if has_wide_floats() else None


def make_int8_linear(weight: Int8Weight, bias: torch.Tensor | None, facts: KernelFacts) -> LinearFn:
    """Inputs quantized token by token, an exact product of integers, scaled in float32; see `kernels.reference.linear`."""
    product = vector_product()
    if product is None or weight.in_features > MAX_INPUTS:
        return _float_linear(weight, bias)
    return Int8Panels(weight, bias, product)


class Int8Panels:
    """A weight [N, K] in panels (see `blocks`), with N filled up to a multiple of 32 and K of 64 by zeros, and its linear."""

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None, product: Callable[..., None]) -> None:
        outputs, inputs = weight.out_features, weight.in_features
        missing = (0, -inputs % STEP_BYTES, 0, -outputs % BLOCK_OUTPUTS)
        filled = torch.nn.functional.pad(weight.qweight, missing) if any(missing) else weight.qweight
        self.out_features, self.in_features = outputs, inputs
        row_bytes = filled.shape[1]
        panels = filled.contiguous().view(torch.int32).view(-1, 16, row_bytes // 4).transpose(1, 2)  # fours of inputs as words
        corrections = filled.sum(1, dtype=torch.int32) * -128 if product is _product_vnni else torch.empty(0, dtype=torch.int32)
        self._product = product
        self._constants: tuple[Any, ...] = (
            moved_to_large_pages(panels).view(-1).view(torch.int8).numpy(),
            row_bytes,
            corrections.numpy(),
            _filled(weight.scales, missing[3]),
            _filled(bias, missing[3]) if bias is not None else np.empty(0, np.float32),
            tile_shapes(),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] -> [M, N]."""
        num_rows, x = x.shape[0], x.contiguous()
        out = empty_rows(num_rows, self.out_features, x.dtype)
        if num_rows:
            where = KINDS[x.dtype], x.data_ptr(), num_rows, self.in_features, out.data_ptr(), self.out_features
            self._product(*where, *self._constants, get_num_threads())
        return out


def _filled(values: torch.Tensor, missing: int) -> np.ndarray:
    return torch.nn.functional.pad(values.float(), (0, missing)).numpy()


def _float_linear(weight: Int8Weight, bias: torch.Tensor | None) -> LinearFn:
    """For CPUs without these instructions: sums of up to EXACT_INPUTS products in float32, which holds them exactly, added in float64."""
    pieces = [piece.float().t() for piece in weight.qweight.split(EXACT_INPUTS, dim=1)]
    scales = weight.scales.float()

    def linear(x: torch.Tensor) -> torch.Tensor:
        quantized, token_scale = quantize_tokens(x)
        parts = [torch.mm(codes.float(), piece) for codes, piece in zip(quantized.split(EXACT_INPUTS, dim=1), pieces, strict=True)]
        sums = parts[0] if len(parts) == 1 else torch.stack(parts).double().sum(0)
        return scaled_sums(sums, token_scale, scales, bias, x.dtype)

    return linear
