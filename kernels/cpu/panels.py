"""Products in bfloat16 with weights of our own layout: dense ones, and ones of 4- and 8-bit codes that are widened block by block.

A block of 32 outputs of codes is widened to bfloat16 in the cache, a piece of the inputs at a time, and multiplied from there: memory is
read at the codes' width, whatever the number of rows. For few rows, 4-bit codes go into dot products directly.

Each row is computed alone, and in an order that depends on nothing but the weight's shape: no fixed tiles are needed in deterministic runs
(which leave out the way for few rows, since its sums are others).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import get_num_threads, njit, prange

from dspark.kernels.cpu.avx2_blocks import has_wide_floats
from dspark.kernels.cpu.avx2_panels import product_floats
from dspark.kernels.cpu.bf16_rows import copy_rows, finish_sums, group_sums
from dspark.kernels.cpu.blocks import (
    AMX_ROWS,
    BLOCK_OUTPUTS,
    DOT_ROWS,
    NOTHING_AHEAD,
    ROW_OF_SUMS,
    STEP_BYTES,
    SUMS_BYTES,
    amx_bf16,
    configure_tiles,
    dot_bf16,
    has_bf16_dots,
    has_bf16_tiles,
    release_tiles,
    tile_shapes,
)
from dspark.kernels.cpu.llvm import aligned_bytes
from dspark.kernels.cpu.pages import moved_to_large_pages
from dspark.kernels.cpu.rows import empty_rows
from dspark.kernels.cpu.views import matrix, vector
from dspark.kernels.cpu.wna16_blocks import (
    INPUTS_OF_LINE,
    nibble_dots,
    widen_4,
    widen_4_scaled,
    widen_4_shifted,
    widen_8,
    widen_8_scaled,
    widen_8_shifted,
)
from dspark.kernels.packing import unpack_codes
from dspark.kernels.wna16 import Wna16Weight

DENSE = 16
"""Bits of a weight that is bfloat16 already."""
FEW_ROWS_BESIDE_TILES, FEW_ROWS_BESIDE_DOTS = 4, 8
"""Up to so many rows 4-bit codes go into dot products directly, instead of being widened for tiles or for dot products."""
PIECE_INPUTS = 512
"""Inputs of a block that are widened before they are multiplied: 32 KB."""
INPUT_STEP = STEP_BYTES // 2
_LINE_OF_4, _LINE_OF_8 = INPUTS_OF_LINE[4], INPUTS_OF_LINE[8]
_BF16 = np.uint16(0)
_BYTE = np.uint8(0)


@njit(cache=True, nogil=True, error_model="numpy")
def _widen(bits, weight, block, start, size, row_inputs, ahead, group, scales, shifts, piece):
    """Inputs start .. start + size - 1 of a block of codes as bfloat16 panels in `piece`; the lines of block `ahead` are asked for."""
    panel_bytes, input_bytes = row_inputs * 2 * bits, 2 * bits
    for j in range(2):
        begin = start
        while begin < start + size:
            g = min(begin // group, max(scales.shape[0] - 1, 0))
            end = start + size if g + 1 >= scales.shape[0] else min(start + size, (g + 1) * group)
            offset = (2 * block + j) * panel_bytes + begin * input_bytes
            later = (2 * ahead + j) * panel_bytes + begin * input_bytes
            first = g * scales.shape[1] + block * BLOCK_OUTPUTS + 16 * j
            target = j * size * 32 + (begin - start) * 32
            flat, flat_shifts = scales.reshape(-1), shifts.reshape(-1)
            if bits == 4:
                lines = (end - begin) // _LINE_OF_4
                if shifts.size:
                    widen_4_shifted(weight, offset, lines, later, flat, flat_shifts, first, piece, target)
                elif scales.size:
                    widen_4_scaled(weight, offset, lines, later, flat, flat_shifts, first, piece, target)
                else:
                    widen_4(weight, offset, lines, later, flat, flat_shifts, first, piece, target)
            else:
                lines = (end - begin) // _LINE_OF_8
                if shifts.size:
                    widen_8_shifted(weight, offset, lines, later, flat, flat_shifts, first, piece, target)
                elif scales.size:
                    widen_8_scaled(weight, offset, lines, later, flat, flat_shifts, first, piece, target)
                else:
                    widen_8(weight, offset, lines, later, flat, flat_shifts, first, piece, target)
            begin = end


@njit(cache=True, nogil=True, error_model="numpy")
def _laid_out(x_at, num_rows, inputs, row_bytes, rows_of_tile):
    """The rows of x, row_bytes apart, with room up to whole tiles: in place where they are so, else copied."""
    if 2 * inputs == row_bytes and num_rows % rows_of_tile == 0:
        return vector(_BYTE, x_at, num_rows * row_bytes)
    x = aligned_bytes(-(-num_rows // rows_of_tile) * rows_of_tile * row_bytes)
    copy_rows(matrix(_BF16, x_at, num_rows, inputs), row_bytes, x)
    return x


@njit
def _room_bytes(num_rows):
    """A worker's sums (rows filled up to whole tiles) and its piece of widened weights."""
    return -(-num_rows // AMX_ROWS) * SUMS_BYTES + 2 * PIECE_INPUTS * BLOCK_OUTPUTS


def _share_of_blocks(multiply: Callable[..., Any], rows_at_once: int) -> Callable[..., Any]:
    """The compiled function of one worker's share of the blocks. multiply: `blocks.amx_bf16` or `dot_bf16`."""

    @njit
    def share(worker, num_workers, x, row_bytes, bits, weight, row_inputs, group, scales, shifts, out_scales, bias, room, out):
        num_rows, num_blocks = out.shape[0], -(-out.shape[1] // BLOCK_OUTPUTS)
        piece_at = room.shape[0] - 2 * PIECE_INPUTS * BLOCK_OUTPUTS
        sums, piece = room[:piece_at].view(np.float32), room[piece_at:]
        last = (worker + 1) * num_blocks // num_workers
        for block in range(worker * num_blocks // num_workers, last):
            ahead = block + 1 if block + 1 < last else block
            if bits == DENSE:
                panel_bytes, steps = 16 * row_bytes, row_bytes // STEP_BYTES
                for row in range(0, num_rows, rows_at_once):
                    multiply(
                        row,
                        num_rows,
                        x,
                        row_bytes,
                        steps,
                        weight,
                        2 * block * panel_bytes,
                        panel_bytes,
                        2 * ahead * panel_bytes,
                        0,
                        sums,
                        0,
                    )
                    finish_sums(sums, 0, row, min(rows_at_once, num_rows - row), out_scales, bias, block, out)
                continue
            for start in range(0, row_inputs, PIECE_INPUTS):
                size = min(PIECE_INPUTS, row_inputs - start)
                _widen(bits, weight, block, start, size, row_inputs, ahead, group, scales, shifts, piece)
                steps, columns = size // INPUT_STEP, x[2 * start :]
                for row in range(0, num_rows, rows_at_once):
                    multiply(row, num_rows, columns, row_bytes, steps, piece, 0, 32 * size, NOTHING_AHEAD, start, sums, row * ROW_OF_SUMS)
            finish_sums(sums, 0, 0, num_rows, out_scales, bias, block, out)

    return share


_amx_share, _dot_share = _share_of_blocks(amx_bf16, AMX_ROWS), _share_of_blocks(dot_bf16, DOT_ROWS)


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _product_amx(
    x_at, num_rows, inputs, out_at, outputs, num_workers, bits, weight, row_inputs, group, scales, shifts, out_scales, bias, shapes
):  # fmt: skip
    """x [M, inputs] and out [M, outputs], bfloat16 by address (see `views.matrix`). weight: bytes, rows filled up to row_inputs.
    What it, scales and shifts are: see `wna16_blocks` (bits 4, 8) and `blocks` (DENSE). out_scales, bias: [N], or empty for none."""
    out, row_bytes = matrix(_BF16, out_at, num_rows, outputs), 2 * row_inputs
    x = _laid_out(x_at, num_rows, inputs, row_bytes, 16)
    room_bytes = _room_bytes(num_rows)
    room = aligned_bytes(num_workers * room_bytes)
    for worker in prange(num_workers):
        configure_tiles(shapes)
        _amx_share(
            worker, num_workers, x, row_bytes, bits, weight, row_inputs, group, scales, shifts, out_scales, bias,
            room[worker * room_bytes : (worker + 1) * room_bytes], out,
        )  # fmt: skip
        release_tiles()


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _product_dots(
    x_at, num_rows, inputs, out_at, outputs, num_workers, bits, weight, row_inputs, group, scales, shifts, out_scales, bias, shapes
):  # fmt: skip
    """The same without tiles."""
    out, row_bytes = matrix(_BF16, out_at, num_rows, outputs), 2 * row_inputs
    x = _laid_out(x_at, num_rows, inputs, row_bytes, 1)
    room_bytes = _room_bytes(num_rows)
    room = aligned_bytes(num_workers * room_bytes)
    for worker in prange(num_workers):
        _dot_share(
            worker, num_workers, x, row_bytes, bits, weight, row_inputs, group, scales, shifts, out_scales, bias,
            room[worker * room_bytes : (worker + 1) * room_bytes], out,
        )  # fmt: skip


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _few_rows(x_at, num_rows, inputs, out_at, outputs, num_workers, weight, row_inputs, group, scales, shifts, bias):
    """The product of few rows with 4-bit codes; group divides the inputs."""
    out, num_groups, no_scales = matrix(_BF16, out_at, num_rows, outputs), inputs // group, np.empty(0, np.float32)
    x, input_sums = vector(_BYTE, x_at, 2 * num_rows * inputs), np.empty(num_rows * num_groups, np.float32)
    if shifts.size:
        group_sums(matrix(_BF16, x_at, num_rows, inputs), group, input_sums)
    panel_bytes, lines, stride = 8 * row_inputs, group // _LINE_OF_4, scales.shape[1]
    flat, flat_shifts, num_blocks = scales.reshape(-1), shifts.reshape(-1), -(-outputs // BLOCK_OUTPUTS)
    for worker in prange(num_workers):
        sums = np.empty(4 * BLOCK_OUTPUTS, np.float32)
        last = (worker + 1) * num_blocks // num_workers
        for block in range(worker * num_blocks // num_workers, last):
            offset, first = 2 * block * panel_bytes, block * BLOCK_OUTPUTS
            ahead = offset + 2 * panel_bytes if block + 1 < last else offset
            row = 0
            while row < num_rows:
                left, at = num_rows - row, 2 * row * inputs
                taken = 4 if left >= 4 else 2 if left >= 2 else 1
                of_rows = input_sums[row * num_groups :]
                nibble_dots(
                    taken, x, at, 2 * inputs, weight, offset, panel_bytes, ahead, num_groups, lines, flat, flat_shifts, first, stride,
                    of_rows, sums,
                )  # fmt: skip
                finish_sums(sums, 0, row, taken, no_scales, bias, block, out)
                row += taken


def product_for(dtype: torch.dtype) -> Callable[..., None] | None:
    """The product, of dense weights and of codes, that this CPU has instructions for, or None."""
    if dtype != torch.bfloat16 or not has_bf16_dots():
        return None
    return _product_amx if has_bf16_tiles() else _product_dots


def dense_product_for(dtype: torch.dtype) -> Callable[..., None] | None:
    """The same of dense weights only."""
    if dtype == torch.bfloat16 and not has_bf16_dots() and has_wide_floats():
        return product_floats
    return product_for(dtype)


class PanelLinear:
    """A weight [N, K] in panels and its linear, x [M, K] bfloat16 -> [M, N]. Made by `dense_panels` or `code_panels`."""

    def __init__(
        self,
        product: Callable[..., None],
        bits: int,
        shape: tuple[int, int],
        panels: torch.Tensor,
        group: int,
        scales: torch.Tensor | None,
        shifts: torch.Tensor | None,
        out_scales: torch.Tensor | None,
        bias: torch.Tensor | None,
        few_rows: bool = False,
    ) -> None:
        self.out_features, self.in_features = shape
        self._product = product
        row_inputs = -(-self.in_features // INPUT_STEP) * INPUT_STEP
        weight, flat_bias = moved_to_large_pages(panels).view(-1).view(torch.uint8).numpy(), _outputs_filled(bias)
        groups = _outputs_filled(scales, 2), _outputs_filled(shifts, 2)
        self._constants: tuple[Any, ...] = (
            bits, weight, row_inputs, group, *groups, _outputs_filled(out_scales), flat_bias, tile_shapes()
        )  # fmt: skip
        every_scale = groups[0] if scales is not None else _outputs_filled(out_scales)[None]
        self._few_constants: tuple[Any, ...] = (weight, row_inputs, group, every_scale, groups[1], flat_bias)
        self._most_few_rows = 0 if not few_rows else FEW_ROWS_BESIDE_TILES if product is _product_amx else FEW_ROWS_BESIDE_DOTS

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] -> [M, N]."""
        num_rows, x = x.shape[0], x.contiguous()
        out = empty_rows(num_rows, self.out_features, x.dtype)
        if num_rows:
            where = x.data_ptr(), num_rows, self.in_features, out.data_ptr(), self.out_features, get_num_threads()
            if num_rows <= self._most_few_rows:
                _few_rows(*where, *self._few_constants)
            else:
                self._product(*where, *self._constants)
        return out


def _outputs_filled(values: torch.Tensor | None, ndim: int = 1) -> np.ndarray:
    """float32 [..., N] with N filled up to whole blocks by zeros; empty for None."""
    if values is None:
        return np.empty((0,) * ndim, np.float32)
    return torch.nn.functional.pad(values.float(), (0, -values.shape[-1] % BLOCK_OUTPUTS)).contiguous().numpy()


def dense_panels(weight: torch.Tensor, bias: torch.Tensor | None, product: Callable[..., None]) -> PanelLinear:
    """Of a bfloat16 weight [N, K]."""
    missing = (0, -weight.shape[1] % INPUT_STEP, 0, -weight.shape[0] % BLOCK_OUTPUTS)
    filled = torch.nn.functional.pad(weight, missing) if any(missing) else weight  # a head is large: no copy that is not needed
    panels = filled.contiguous().view(torch.int32).view(-1, 16, filled.shape[1] // 2).transpose(1, 2)  # pairs of inputs as words
    return PanelLinear(product, DENSE, (weight.shape[0], weight.shape[1]), panels, 0, None, None, None, bias)


def refuses_codes(weight: Wna16Weight) -> str | None:
    """Why these panels cannot hold a quantized weight, or None."""
    if weight.bits not in INPUTS_OF_LINE:
        return f"needs 4 or 8 bits, the weight has {weight.bits}"
    if weight.scales.shape[0] > 1 and weight.group_size % INPUTS_OF_LINE[weight.bits]:
        return f"needs a group size that {INPUTS_OF_LINE[weight.bits]} divides, it is {weight.group_size}"
    return None


def code_panels(weight: Wna16Weight, bias: torch.Tensor | None, product: Callable[..., None], few_rows: bool) -> PanelLinear:
    """Of a weight that `refuses_codes` does not refuse. few_rows: whether few rows may take another way, with other roundings."""
    outputs, inputs, middle = weight.out_features, weight.in_features, 2 ** (weight.bits - 1)
    codes = unpack_codes(weight.qweight, weight.bits, inputs).t()  # [N, K]
    filled = torch.nn.functional.pad(codes, (0, -inputs % INPUT_STEP, 0, -outputs % BLOCK_OUTPUTS), value=middle)
    panels = _nibble_words(filled) if weight.bits == 4 else _byte_pairs(filled)
    one_scale = (
        weight.scales.shape[0] == 1 and weight.zeros is None
    )  # then the codes themselves are bfloat16, and rows are scaled at the end
    scales = None if one_scale else weight.scales
    shifts = None if weight.zeros is None else weight.zeros.float() - middle
    out_scales = weight.scales[0] if one_scale else None
    few = few_rows and weight.bits == 4 and inputs % weight.group_size == 0 and weight.group_size % INPUTS_OF_LINE[4] == 0
    made = PanelLinear(product, weight.bits, (outputs, inputs), panels, weight.group_size, scales, shifts, out_scales, bias, few)
    return made


def _nibble_words(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [N, K] of 4 bits -> int32 [N / 16, K / 8, 16], see `wna16_blocks`."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int32)
    for inputs, place in enumerate((0, 16, 4, 20, 8, 24, 12, 28)):  # where input i of eight begins
        words |= codes[:, inputs::8].to(torch.int32) << place
    return words.view(-1, 16, words.shape[1]).transpose(1, 2).contiguous()


def _byte_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [N, K] of 8 bits -> int8 [N / 16, K / 2, 2, 16], see `wna16_blocks`."""
    signed = (codes.to(torch.int16) - 128).to(torch.int8)
    return signed.view(-1, 2, 8, codes.shape[1] // 2, 2).permute(0, 3, 1, 2, 4).contiguous()
