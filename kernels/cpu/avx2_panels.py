"""Products of `panels` and `int8` for CPUs with AVX2 alone: bfloat16 weights times rows in float32, 8-bit integers in pairs.

Both read the panels that the other products read, and a row's result depends on nothing but the row.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from dspark.kernels.cpu.avx2_blocks import FLOAT_ROWS, INTEGER_ROWS, float_bf16, pairs_int8, widen_pairs_4, widen_pairs_8
from dspark.kernels.cpu.bf16_rows import finish_sums
from dspark.kernels.cpu.blocks import BLOCK_OUTPUTS, NOTHING_AHEAD, ROW_OF_SUMS, STEP_BYTES
from dspark.kernels.cpu.int8_rows import finish_rows, quantize_row
from dspark.kernels.cpu.llvm import aligned_bytes
from dspark.kernels.cpu.simd import LANES, widen
from dspark.kernels.cpu.views import matrix

INPUT_STEP = STEP_BYTES // 2
PIECE_INPUTS = 256
"""Inputs of a block of codes that are widened before they are multiplied: 16 KB, beside rows in a cache of 32."""
_BF16 = np.uint16(0)
_SUMS_BYTES = FLOAT_ROWS * ROW_OF_SUMS


@njit(cache=True, nogil=True, error_model="numpy")
def _widen_row(source, target):
    """bfloat16 as uint16 -> float32, with zeros behind."""
    width = source.shape[0]
    for i in range(width):
        target[i] = widen(source[i])
    target[width:] = np.float32(0.0)


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def product_floats(
    x_at, num_rows, inputs, out_at, outputs, num_workers, bits, weight, row_inputs, group, scales, shifts, out_scales, bias, shapes
):  # fmt: skip
    """As `panels._product_dots`, of dense weights only."""
    source, out = matrix(_BF16, x_at, num_rows, inputs), matrix(_BF16, out_at, num_rows, outputs)
    row_bytes, panel_bytes, steps = 4 * row_inputs, 32 * row_inputs, row_inputs // INPUT_STEP
    x, room = aligned_bytes((num_rows + 1) * row_bytes), aligned_bytes(num_workers * _SUMS_BYTES)
    rows, num_blocks = x.view(np.float32).reshape(num_rows + 1, row_inputs), -(-outputs // BLOCK_OUTPUTS)
    rows[num_rows] = np.float32(0.0)
    for row in prange(num_rows):
        _widen_row(source[row], rows[row])
    for worker in prange(num_workers):
        sums = room[worker * _SUMS_BYTES : (worker + 1) * _SUMS_BYTES].view(np.float32)
        last = (worker + 1) * num_blocks // num_workers
        for block in range(worker * num_blocks // num_workers, last):
            offset = 2 * block * panel_bytes
            ahead = offset + 2 * panel_bytes if block + 1 < last else offset
            for row in range(0, num_rows, FLOAT_ROWS):
                float_bf16(row, num_rows, x, row_bytes, steps, weight, offset, panel_bytes, ahead, 0, sums, 0)
                finish_sums(sums, 0, row, min(FLOAT_ROWS, num_rows - row), out_scales, bias, block, out)


@njit(cache=True, nogil=True, error_model="numpy")
def _widen_block(bits, codes, scales, zeros, block, start, size, piece):
    """Inputs start .. start + size - 1 of a block's two panels as lines of bfloat16 in `piece`, zeros where there are none. codes [panels,
    bytes of K, 16], see `wna16.PanelWeight`."""
    num_panels, num_bytes = codes.shape[0], codes.shape[1]
    inputs, flat = num_bytes * 8 // bits, codes.reshape(-1)
    group = inputs // scales.shape[0]
    flat_scales, flat_zeros = scales.reshape(-1), zeros.reshape(-1)
    for j in range(2):
        panel, begin, target = 2 * block + j, start, j * size * 32
        while panel < num_panels and begin < min(start + size, inputs):
            g = begin // group
            end = min(start + size, (g + 1) * group)
            offset, first = (panel * num_bytes + begin * bits // 8) * LANES, g * scales.shape[1] + panel * LANES
            at = target + (begin - start) * 32
            if bits == 4:
                widen_pairs_4(flat, offset, (end - begin) // 2, flat_scales, flat_zeros, first, piece, at)
            else:
                widen_pairs_8(flat, offset, (end - begin) // 2, flat_scales, flat_zeros, first, piece, at)
            begin = end
        piece[target + (begin - start) * 32 : target + size * 32] = np.uint8(0)


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def product_codes(x_at, num_rows, inputs, out_at, outputs, num_workers, bits, codes, scales, zeros):
    """x [M, inputs] and out [M, outputs], bfloat16 by address (see `views.matrix`); the weight, of codes, is widened as it is used."""
    source, out = matrix(_BF16, x_at, num_rows, inputs), matrix(_BF16, out_at, num_rows, outputs)
    row_inputs = -(-inputs // INPUT_STEP) * INPUT_STEP
    row_bytes, num_blocks, none = 4 * row_inputs, -(-outputs // BLOCK_OUTPUTS), np.empty(0, np.float32)
    x, rows_of_sums = aligned_bytes((num_rows + 1) * row_bytes), (num_rows + 1) * ROW_OF_SUMS
    rows = x.view(np.float32).reshape(num_rows + 1, row_inputs)
    rows[num_rows] = np.float32(0.0)
    for row in prange(num_rows):
        _widen_row(source[row], rows[row])
    for worker in prange(num_workers):
        room = aligned_bytes(rows_of_sums + 2 * PIECE_INPUTS * BLOCK_OUTPUTS)
        sums, piece = room[:rows_of_sums].view(np.float32), room[rows_of_sums:]
        for block in range(worker * num_blocks // num_workers, (worker + 1) * num_blocks // num_workers):
            for start in range(0, row_inputs, PIECE_INPUTS):
                size = min(PIECE_INPUTS, row_inputs - start)
                _widen_block(bits, codes, scales, zeros, block, start, size, piece)
                columns, steps = x[4 * start :], size // INPUT_STEP
                for row in range(0, num_rows, FLOAT_ROWS):
                    float_bf16(row, num_rows, columns, row_bytes, steps, piece, 0, 32 * size, NOTHING_AHEAD, start, sums, row * ROW_OF_SUMS)
            finish_sums(sums, 0, 0, num_rows, none, none, block, out)


@njit(cache=True, nogil=True, error_model="numpy")
def _pair_row(source, target):
    """Codes int8, four by four a, b, c, d -> int16 a, c, b, d."""
    for i in range(0, source.shape[0], 4):
        target[i] = source[i]
        target[i + 1] = source[i + 2]
        target[i + 2] = source[i + 1]
        target[i + 3] = source[i + 3]


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def product_pairs(
    kind, x_at, num_rows, inputs, out_at, outputs, weight, row_bytes, corrections, scales, bias, shapes, num_workers
):  # fmt: skip
    """As `int8._product_vnni`; corrections are empty."""
    source, out = matrix(kind, x_at, num_rows, inputs), matrix(kind, out_at, num_rows, outputs)
    num_blocks, steps, panel_bytes = scales.shape[0] // BLOCK_OUTPUTS, row_bytes // STEP_BYTES, 16 * row_bytes
    x, room = aligned_bytes(2 * num_rows * row_bytes), aligned_bytes(num_workers * _SUMS_BYTES)
    rows, row_scales = x.view(np.int16).reshape(num_rows, row_bytes), np.empty(num_rows, np.float32)
    codes = np.zeros((num_rows, row_bytes), np.uint8)
    for row in prange(num_rows):
        quantize_row(source, row, np.int32(0), codes, row_scales)
        _pair_row(codes[row].view(np.int8), rows[row])
    for worker in prange(num_workers):
        sums = room[worker * _SUMS_BYTES : (worker + 1) * _SUMS_BYTES].view(np.int32)
        last = (worker + 1) * num_blocks // num_workers
        for block in range(worker * num_blocks // num_workers, last):
            offset = 2 * block * panel_bytes
            ahead = offset + 2 * panel_bytes if block + 1 < last else offset
            for row in range(0, num_rows, INTEGER_ROWS):
                pairs_int8(row, num_rows, x, 2 * row_bytes, steps, weight, offset, panel_bytes, ahead, 0, sums, 0)
                finish_rows(sums, 0, row, min(INTEGER_ROWS, num_rows - row), row_scales, corrections, scales, bias, block, out)
