"""The inner loops of AWQ's searches, compiled: neighbours in memory are outputs, so that one vector holds one input's weight of 16 outputs.

As in `loops`: every constant comes in float32, `magic` rounds a small number to the nearest integer, and the loops release the GIL.
G groups of g inputs, R outputs.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from dspark.kernels.compile_cache import make_cache_optional

make_cache_optional()

LANES = 64
"""Outputs that are treated together: four vectors of 16, whose values stay in registers and the first-level cache."""
MAGIC = np.float32(1.5 * 2.0**23)
"""1.5 * 2**(bits of the mantissa): what is added to it and taken away again is whole, ties to even."""


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
def rounding_errors(weight, scale, steps, zeros, max_code, magic, errors):
    """errors [G, g, R]: what weight * scale becomes on the grid of steps and zeros [G, R], over scale, less the weight."""
    num_groups, group_size, num_rows = weight.shape
    inverse, low, high = np.empty((3, LANES), weight.dtype)
    for group in range(num_groups):
        for start in range(0, num_rows, LANES):
            count = min(LANES, num_rows - start)
            step, zero = steps[group, start : start + count], zeros[group, start : start + count]
            for r in range(count):
                inverse[r] = 1 / step[r]
                low[r], high[r] = -zero[r], max_code - zero[r]
            for k in range(group_size):
                row, error = weight[group, k, start : start + count], errors[group, k, start : start + count]
                factor, back = scale[group, k], 1 / scale[group, k]
                for r in range(count):
                    level = row[r] * factor * inverse[r]
                    level = level if level > low[r] else low[r]
                    level = level if level < high[r] else high[r]
                    error[r] = step[r] * ((level + magic) - magic) * back - row[r]


@njit(cache=True, nogil=True, error_model="numpy")
def smallest_errors(weight, scale, importance, steps, zeros, max_code, magic, smallest):
    """smallest [G, R]: the least sum over a group of importance * error ** 2 of weight * scale, on the grids steps and zeros [P, G, R].

    weight [G, g, R]; scale, importance [G, g].
    """
    num_groups, group_size, num_rows = weight.shape
    scaled = np.empty((group_size, LANES), weight.dtype)
    inverse, low, high, total = np.empty((4, LANES), weight.dtype)
    for group in range(num_groups):
        for start in range(0, num_rows, LANES):
            count = min(LANES, num_rows - start)
            for k in range(group_size):
                for r in range(count):
                    scaled[k, r] = weight[group, k, start + r] * scale[group, k]
            for p in range(len(steps)):
                step, zero = steps[p, group, start : start + count], zeros[p, group, start : start + count]
                for r in range(count):
                    inverse[r] = 1 / step[r]
                    low[r], high[r] = -zero[r], max_code - zero[r]
                    total[r] = 0
                for k in range(group_size):
                    share = importance[group, k]
                    for r in range(count):
                        level = scaled[k, r] * inverse[r]
                        level = level if level > low[r] else low[r]
                        level = level if level < high[r] else high[r]
                        off = step[r] * ((level + magic) - magic) - scaled[k, r]
                        total[r] += share * off * off
                for r in range(count):
                    if p == 0 or total[r] < smallest[group, start + r]:
                        smallest[group, start + r] = total[r]
