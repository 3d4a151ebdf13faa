"""The inner loops of AWQ's searches, compiled: neighbours in memory are outputs, so that one vector holds one input's weight of 16 outputs.

As in `loops`: every constant comes in float32, `magic` rounds a small number to the nearest integer, and the loops release the GIL. Ranges
become steps and zero points as in `grid`, and steps are rounded to float16's 11 digits, since that is how nearly all are stored: the
largest weight of a symmetric group lies right between two codes, and an unrounded step would say nothing of where it goes.

G groups of g inputs, R outputs.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from dspark.kernels.compile_cache import prepare_cache

prepare_cache()

LANES = 64
"""Outputs that are treated together: four vectors of 16, whose values stay in registers and the first-level cache."""
MAGIC = np.float32(1.5 * 2.0**23)
"""1.5 * 2**(bits of the mantissa): what is added to it and taken away again is whole, ties to even."""
_SPLIT = np.float32(2.0**13 + 1)  # Dekker's splitting of a float32: leaves the 11 leading digits


@njit(inline="always")
def _step_and_zero(low, high, limit, max_code, symmetric, magic):
    """Of a group's range, cut at a limit and widened to hold zero."""
    low = min(max(low, -limit), np.float32(0))
    high = max(min(high, limit), np.float32(0))
    if symmetric:
        high = max(high, -low)
        low = -high
    step = (high - low) / max_code
    step = step if step > 0 else np.float32(1)
    shifted = step * _SPLIT
    step = shifted - (shifted - step)
    if symmetric:
        return step, (max_code + 1) * np.float32(0.5)
    return step, min((-low / step + magic) - magic, max_code)


@njit(cache=True, nogil=True, error_model="numpy")
def scaled_ranges(weight, scale, low, high):
    """low, high [G, R]: the smallest and largest weight * scale of each group. weight [G, g, R], scale [G, g]."""
    num_groups, group_size, num_rows = weight.shape
    for group in range(num_groups):
        for start in range(0, num_rows, LANES):
            count = min(LANES, num_rows - start)
            smallest, largest = low[group, start : start + count], high[group, start : start + count]
            for k in range(group_size):
                row, factor = weight[group, k, start : start + count], scale[group, k]
                for r in range(count):
                    value = row[r] * factor
                    smallest[r] = value if k == 0 or value < smallest[r] else smallest[r]
                    largest[r] = value if k == 0 or value > largest[r] else largest[r]


@njit(cache=True, nogil=True, error_model="numpy")
def rounding_errors(weight, scale, low, high, limits, max_code, symmetric, magic, errors):
    """errors [G, g, R]: what rounding makes of weight * scale, over scale, less the weight.

    weight [G, g, R], scale [G, g]; low, high [G, R] as `scaled_ranges` gives them; limits [G, R] of the range.
    """
    num_groups, group_size, num_rows = weight.shape
    steps, inverse, least, most = np.empty((4, LANES), weight.dtype)
    for group in range(num_groups):
        for start in range(0, num_rows, LANES):
            count = min(LANES, num_rows - start)
            for r in range(count):
                lane = start + r
                step, zero = _step_and_zero(low[group, lane], high[group, lane], limits[group, lane], max_code, symmetric, magic)
                steps[r], inverse[r] = step, 1 / step
                least[r], most[r] = -zero, max_code - zero
            for k in range(group_size):
                row, error = weight[group, k, start : start + count], errors[group, k, start : start + count]
                factor, back = scale[group, k], 1 / scale[group, k]
                for r in range(count):
                    level = row[r] * factor * inverse[r]
                    level = level if level > least[r] else least[r]
                    level = level if level < most[r] else most[r]
                    error[r] = steps[r] * ((level + magic) - magic) * back - row[r]


@njit(cache=True, nogil=True, error_model="numpy")
def smallest_errors(weight, scale, importance, low, high, ratios, max_code, symmetric, magic, smallest):
    """smallest [G, R]: the least sum over a group of importance * error ** 2, of all limits that are `ratios` of its largest weight.

    Errors are those of weight * scale. weight [G, g, R]; scale, importance [G, g]; low, high [G, R] as `scaled_ranges` gives them.
    """
    num_groups, group_size, num_rows = weight.shape
    scaled = np.empty((group_size, LANES), weight.dtype)
    steps, inverse, least, most, total = np.empty((5, LANES), weight.dtype)
    for group in range(num_groups):
        for start in range(0, num_rows, LANES):
            count = min(LANES, num_rows - start)
            for k in range(group_size):
                for r in range(count):
                    scaled[k, r] = weight[group, k, start + r] * scale[group, k]
            for p in range(len(ratios)):
                for r in range(count):
                    lane = start + r
                    limit = max(-low[group, lane], high[group, lane]) * ratios[p]
                    step, zero = _step_and_zero(low[group, lane], high[group, lane], limit, max_code, symmetric, magic)
                    steps[r], inverse[r] = step, 1 / step
                    least[r], most[r] = -zero, max_code - zero
                    total[r] = 0
                for k in range(group_size):
                    share = importance[group, k]
                    for r in range(count):
                        level = scaled[k, r] * inverse[r]
                        level = level if level > least[r] else least[r]
                        level = level if level < most[r] else most[r]
                        off = steps[r] * ((level + magic) - magic) - scaled[k, r]
                        total[r] += share * off * off
                for r in range(count):
                    if p == 0 or total[r] < smallest[group, start + r]:
                        smallest[group, start + r] = total[r]
