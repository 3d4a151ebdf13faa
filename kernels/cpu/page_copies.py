"""Copies inside a paged cache: whole blocks (copy-on-write), and single slots (the kept nodes of a draft tree).

Seen as bytes, a copy is the same for every cache, and the order of what lies inside a block matters to slots alone. torch's own indexing
takes several times as long for the few kilobytes that these are.
"""

import numpy as np
import torch
from numba import njit

from dspark.kernels.cpu.attention import supports as supports  # the same caches
from dspark.kernels.cpu.views import at, vector

_BYTE, _INDEX = np.uint8(0), np.int64(0)


@njit(cache=True, nogil=True, error_model="numpy")
def _copy_blocks(cache_at, cache_bytes, page_bytes, source_at, target_at, count):
    """A page is a whole number of words of 8 bytes: 16 divides its slots."""
    cache, page = vector(_INDEX, cache_at, cache_bytes // 8), page_bytes // 8
    source, target = vector(_INDEX, source_at, count), vector(_INDEX, target_at, count)
    for i in range(count):
        start, end = source[i] * page, target[i] * page
        for word in range(page):
            cache[end + word] = cache[start + word]


@njit(cache=True, nogil=True, error_model="numpy")
def _slot_bytes(cache, slot, row, to_cache, keys_inside_out, shape):
    """One slot of all heads to `row`, or from it. shape: num_kv_heads, block_size, head_dim, bytes of an element. Keys stand
    dimension-major, their elements a block's length apart."""
    num_kv_heads, block_size, head_dim, item = shape
    block, offset = slot // block_size, slot % block_size
    step = block_size * item if keys_inside_out else item
    for head in range(num_kv_heads):
        start = (block * num_kv_heads + head) * block_size * head_dim * item + offset * (item if keys_inside_out else head_dim * item)
        for d in range(head_dim):
            for byte in range(item):
                inside, place = (head * head_dim + d) * item + byte, start + d * step + byte
                if to_cache:
                    cache[place] = row[inside]
                else:
                    row[inside] = cache[place]


@njit(cache=True, nogil=True, error_model="numpy")
def _copy_slots(cache_at, cache_bytes, source_at, target_at, count, keys_inside_out, shape):
    """All are read before any is written: a slot may be the source of one copy and the target of another."""
    cache = vector(_BYTE, cache_at, cache_bytes)
    source, target = vector(_INDEX, source_at, count), vector(_INDEX, target_at, count)
    num_kv_heads, _, head_dim, item = shape
    rows = np.empty((count, num_kv_heads * head_dim * item), np.uint8)
    for i in range(count):
        _slot_bytes(cache, source[i], rows[i], False, keys_inside_out, shape)
    for i in range(count):
        _slot_bytes(cache, target[i], rows[i], True, keys_inside_out, shape)


def copy_blocks(k_cache: torch.Tensor, v_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """See `kernels.reference.elementwise`; no target is a source."""
    source, target = source.contiguous(), target.contiguous()
    for cache in (k_cache, v_cache):
        _copy_blocks(at(cache), cache.nbytes, cache[0].nbytes, at(source), at(target), source.shape[0])


def copy_slots(k_cache: torch.Tensor, v_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """See `kernels.reference.elementwise`; the keys are dimension-major."""
    source, target = source.contiguous(), target.contiguous()
    shape = (*k_cache.shape[1:], k_cache.element_size())
    for cache, inside_out in ((k_cache, True), (v_cache, False)):
        _copy_slots(at(cache), cache.nbytes, at(source), at(target), source.shape[0], inside_out, shape)
