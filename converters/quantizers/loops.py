"""The inner loops of the solvers, compiled: neighbours in memory are outputs, so that one vector holds one input's weight of 16 outputs.

Arrays are float32, or float64 in tests; every constant comes in the arrays' own type, so that nothing is widened. `magic` is
1.5 * 2**(bits of the mantissa): adding and subtracting it rounds a small number to the nearest integer, ties to even. The loops release the
GIL: callers run them on slices of outputs (`converters.threads`).

g inputs of a group, B of a block, R outputs, G groups, P candidates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from dspark.kernels.compile_cache import prepare_cache

prepare_cache()

LANES = 64
"""Outputs that are treated together: four vectors of 16, whose values stay in registers and the first-level cache."""
FP8_SPLIT, FP8_FIXED, FP8_NORMAL, FP8_LARGEST = 2.0**20 + 1, 1.5 * 2.0**14, 2.0**-6, 448.0
"""For float32: what leaves 4 significant bits, what leaves multiples of 2**-9; the smallest normal and the largest number."""
_MAGIC = {np.dtype(np.float32): 1.5 * 2.0**23, np.dtype(np.float64): 1.5 * 2.0**52}


def magic(dtype: np.dtype) -> Any:
    """The rounding constant, as a scalar of its type."""
    return dtype.type(_MAGIC[dtype])


@njit(cache=True, nogil=True, error_model="numpy")
def best_candidates(weight, importance, scales, zeros, max_code, exponent, magic, best):
    """best int64 [G, R]: the candidate with the least sum over g of importance * |rounded - weight| ** exponent, the first of equal ones.

    weight [G, g, R], importance [G, g], scales and zeros [P, G, R].
    """
    num_groups, group_size, num_rows = weight.shape
    error, inverse, low, high = np.empty((4, LANES), weight.dtype)
    smallest = np.empty(LANES, weight.dtype)
    for group in range(num_groups):
        for start in range(0, num_rows, LANES):
            count = min(LANES, num_rows - start)
            for p in range(len(scales)):
                scale, zero = scales[p, group, start : start + count], zeros[p, group, start : start + count]
                for r in range(count):
                    inverse[r] = 1 / scale[r]
                    low[r], high[r] = -zero[r], max_code - zero[r]
                    error[r] = 0
                for k in range(group_size):
                    row, share = weight[group, k, start : start + count], importance[group, k]
                    if exponent == 2:
                        for r in range(count):
                            code = row[r] * inverse[r]
                            code = code if code > low[r] else low[r]
                            code = code if code < high[r] else high[r]
                            off = scale[r] * ((code + magic) - magic) - row[r]
                            error[r] += share * off * off
                    else:
                        for r in range(count):
                            code = min(max(row[r] / scale[r], low[r]), high[r])
                            error[r] += share * abs(scale[r] * ((code + magic) - magic) - row[r]) ** exponent
                for r in range(count):
                    if p == 0 or error[r] < smallest[r]:
                        smallest[r] = error[r]
                        best[group, start + r] = p


@njit(cache=True, nogil=True, error_model="numpy")
def solve_block(weight, upper, pull, group_of, scales, zeros, max_code, magic, codes, errors):
    """Choose the codes of a block's inputs one after the other, and have the inputs after each make up for its error.

    weight [B, R]: in, the weights; out, what their codes stand for. upper [B, B]: the block of the factor of the inverse Hessian.
    pull [B, B] or empty: GPTAQ's correction. group_of int64 [B]: rows of scales and zeros [G, R]. Filled: codes uint8 [B, R], and
    errors [B, R], each error over its diagonal element of `upper`.
    """
    num_inputs, num_rows = weight.shape
    before = np.empty(LANES, weight.dtype)
    for start in range(0, num_rows, LANES):
        count = min(LANES, num_rows - start)
        for i in range(num_inputs):
            row, error, code = weight[i, start : start + count], errors[i, start : start + count], codes[i, start : start + count]
            scale, zero = scales[group_of[i], start : start + count], zeros[group_of[i], start : start + count]
            diagonal = upper[i, i]
            for r in range(count):
                before[r] = row[r]
                level = row[r] / scale[r]
                level = level if level > -zero[r] else -zero[r]
                level = level if level < max_code - zero[r] else max_code - zero[r]
                level = (level + magic) - magic
                code[r] = np.uint8(level + zero[r])
                row[r] = scale[r] * level
                error[r] = (before[r] - row[r]) / diagonal
            for j in range(i + 1, num_inputs):
                later, share = weight[j, start : start + count], upper[i, j]
                for r in range(count):
                    later[r] -= error[r] * share
            if pull.size:
                for j in range(i + 1, num_inputs):
                    later, share = weight[j, start : start + count], pull[i, j]
                    for r in range(count):
                        later[r] += before[r] * share


@njit(cache=True, nogil=True, error_model="numpy")
def solve_fp8_block(weight, upper, group_of, scales, errors):
    """`solve_block` with float8 numbers (e4m3) times scales [G, R] in place of codes; rounding as in `fp8_errors`."""
    num_inputs, num_rows = weight.shape
    one, split, fixed = weight.dtype.type(1), weight.dtype.type(FP8_SPLIT), weight.dtype.type(FP8_FIXED)
    smallest, largest = weight.dtype.type(FP8_NORMAL), weight.dtype.type(FP8_LARGEST)
    for start in range(0, num_rows, LANES):
        count = min(LANES, num_rows - start)
        for i in range(num_inputs):
            row, error = weight[i, start : start + count], errors[i, start : start + count]
            scale, inverse = scales[group_of[i], start : start + count], one / upper[i, i]
            for r in range(count):
                number = row[r] / scale[r]
                number = number if number > -largest else -largest
                number = number if number < largest else largest
                wide = number * split
                normal = wide - (wide - number)
                small = (number + fixed) - fixed
                chosen = scale[r] * (normal if abs(number) >= smallest else small)
                error[r] = (row[r] - chosen) * inverse
                row[r] = chosen
            for j in range(i + 1, num_inputs):
                later, share = weight[j, start : start + count], upper[i, j]
                for r in range(count):
                    later[r] -= error[r] * share


@njit(cache=True, nogil=True, error_model="numpy")
def fp8_errors(weight, importance, scales, rows, columns, errors):
    """errors float64 [P, blocks of outputs, blocks of inputs] += sums over each block of importance * (rounded - weight)**2.

    weight float32 [N, K], importance [K], scales [P, ...] as errors; blocks of `rows` outputs and `columns` inputs. Rounding to four
    significant bits is Veltkamp's splitting (a tie may fall to the other side: its error is the same), below 2**-6 the steps are 2**-9.
    """
    num_outputs, num_inputs = weight.shape
    sums = np.empty(LANES, np.float32)
    split, fixed, smallest, largest = np.float32(FP8_SPLIT), np.float32(FP8_FIXED), np.float32(FP8_NORMAL), np.float32(FP8_LARGEST)
    for p in range(len(scales)):
        for n in range(num_outputs):
            for block in range(scales.shape[2]):
                scale = scales[p, n // rows, block]
                inverse = np.float32(1) / scale
                sums[:] = 0
                end = min((block + 1) * columns, num_inputs)
                for start in range(block * columns, end, LANES):
                    count = min(LANES, end - start)
                    row, share = weight[n, start : start + count], importance[start : start + count]
                    for k in range(count):
                        number = row[k] * inverse
                        number = number if number > -largest else -largest
                        number = number if number < largest else largest
                        wide = number * split
                        normal = wide - (wide - number)
                        small = (number + fixed) - fixed
                        off = scale * (normal if abs(number) >= smallest else small) - row[k]
                        sums[k] += share[k] * off * off
                errors[p, n // rows, block] += sums.sum()


@njit(cache=True, nogil=True, error_model="numpy")
def add_magnitudes(x, sums, largest):
    """sums [K] += |x| summed over the tokens, largest [K] = its maximum with |x|; x [T, K]. A NaN shows in the sums."""
    num_tokens, num_inputs = x.shape
    for t in range(num_tokens):
        row = x[t]
        for k in range(num_inputs):
            magnitude = abs(row[k])
            sums[k] += magnitude
            largest[k] = magnitude if magnitude > largest[k] else largest[k]
