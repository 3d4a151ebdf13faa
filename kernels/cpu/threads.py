"""The OpenMP threads of compiled loops, as far as others than the loops care."""

import numba
import numpy as np
import torch
from numba import njit, prange

TORCH_ELEMENTS = 1 << 17
"""torch wakes its threads for so many elements."""


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _touch(cells):
    for i in prange(cells.shape[0]):
        cells[i] = i


def start_pools(threads: int) -> None:
    """Run an empty loop of each library: the calling thread has its pools of `threads` OpenMP threads from now on, until it ends."""
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    _touch(np.empty(threads, np.int64))
    torch.ones(TORCH_ELEMENTS).add_(1)
