"""Norms, rotary embedding with KV store, activation: compiled loops over rows, float32 inside, for float32 and bfloat16 tensors.

Every row is computed alone and in a fixed order, so results do not depend on the batch or on the number of threads. Each op has two
drivers over one row function: a parallel one, and a serial one for small batches, where waking threads would take longer than the work.
"""

from collections.abc import Callable

import numpy as np
import torch
from numba import njit, prange

from dspark.kernels.cpu.attention import supports as supports_cache
from dspark.kernels.cpu.elementwise_rows import add_norm_row, gelu_tanh_row, norm_row, silu_row
from dspark.kernels.cpu.rope_rows import expect_token, rope_store_row
from dspark.kernels.cpu.rows import empty_rows
from dspark.kernels.cpu.views import CACHE_KINDS, KINDS, at, matrix, vector
from dspark.kernels.facts import KernelFacts
from dspark.kernels.kv_cache import KVScales

CACHE_OPS = ("rope_store_kv", "read_kv")
SERIAL_ELEMENTS = 32768
"""Up to so many elements (5 to 10 microseconds of work) an op runs on the calling thread."""


def supports(op: str, facts: KernelFacts) -> str | None:
    if op in CACHE_OPS:
        return supports_cache(op, facts)
    if facts.dtype not in (torch.float32, torch.bfloat16):
        return f"is compiled for float32 and bfloat16, the dtype is {str(facts.dtype).removeprefix('torch.')}"
    return None


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _rms_norm_parallel(kind, weight_kind, x_at, weight_at, out_at, num_rows, width, eps):
    x, out = matrix(kind, x_at, num_rows, width), matrix(kind, out_at, num_rows, width)
    weight = matrix(weight_kind, weight_at, 1, width)[0]
    for row in prange(num_rows):
        norm_row(x[row], weight, eps, out[row])


@njit(cache=True, nogil=True, error_model="numpy")
def _rms_norm_serial(kind, weight_kind, x_at, weight_at, out_at, num_rows, width, eps):
    x, out = matrix(kind, x_at, num_rows, width), matrix(kind, out_at, num_rows, width)
    weight = matrix(weight_kind, weight_at, 1, width)[0]
    for row in range(num_rows):
        norm_row(x[row], weight, eps, out[row])


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _add_rms_norm_parallel(kind, weight_kind, x_at, residual_at, weight_at, out_at, num_rows, width, eps):
    x, residual, out = (
        matrix(kind, x_at, num_rows, width),
        matrix(kind, residual_at, num_rows, width),
        matrix(kind, out_at, num_rows, width),
    )
    weight = matrix(weight_kind, weight_at, 1, width)[0]
    for row in prange(num_rows):
        add_norm_row(x[row], residual[row], weight, eps, out[row])


@njit(cache=True, nogil=True, error_model="numpy")
def _add_rms_norm_serial(kind, weight_kind, x_at, residual_at, weight_at, out_at, num_rows, width, eps):
    x, residual, out = (
        matrix(kind, x_at, num_rows, width),
        matrix(kind, residual_at, num_rows, width),
        matrix(kind, out_at, num_rows, width),
    )
    weight = matrix(weight_kind, weight_at, 1, width)[0]
    for row in range(num_rows):
        add_norm_row(x[row], residual[row], weight, eps, out[row])


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _silu_parallel(kind, gate_up_at, out_at, num_rows, width):
    gate_up, out = matrix(kind, gate_up_at, num_rows, 2 * width), matrix(kind, out_at, num_rows, width)
    for row in prange(num_rows):
        silu_row(gate_up[row, :width], gate_up[row, width:], out[row])


@njit(cache=True, nogil=True, error_model="numpy")
def _silu_serial(kind, gate_up_at, out_at, num_rows, width):
    gate_up, out = matrix(kind, gate_up_at, num_rows, 2 * width), matrix(kind, out_at, num_rows, width)
    for row in range(num_rows):
        silu_row(gate_up[row, :width], gate_up[row, width:], out[row])


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _gelu_tanh_parallel(kind, gate_up_at, out_at, num_rows, width):
    gate_up, out = matrix(kind, gate_up_at, num_rows, 2 * width), matrix(kind, out_at, num_rows, width)
    for row in prange(num_rows):
        gelu_tanh_row(gate_up[row, :width], gate_up[row, width:], out[row])


@njit(cache=True, nogil=True, error_model="numpy")
def _gelu_tanh_serial(kind, gate_up_at, out_at, num_rows, width):
    gate_up, out = matrix(kind, gate_up_at, num_rows, 2 * width), matrix(kind, out_at, num_rows, width)
    for row in range(num_rows):
        gelu_tanh_row(gate_up[row, :width], gate_up[row, width:], out[row])


@njit(cache=True, nogil=True, error_model="numpy")
def _rope_arrays(kinds, places, sizes, shape):
    """The arrays of `rope_store_kv`: qkv, cos, sin, both norm weights, both caches, slots, both caches' scales."""
    kind, weight_kind, cache_kind = kinds
    qkv_at, cos_at, sin_at, q_norm_at, k_norm_at, k_at, v_at, slots_at, k_scales_at, v_scales_at = places
    num_rows, half, norm_size, cache_size, scales_size = sizes
    num_heads, num_kv_heads, _, head_dim = shape
    return (
        matrix(kind, qkv_at, num_rows, (num_heads + 2 * num_kv_heads) * head_dim),
        matrix(np.float32(0), cos_at, num_rows, half),
        matrix(np.float32(0), sin_at, num_rows, half),
        vector(weight_kind, q_norm_at, norm_size),
        vector(weight_kind, k_norm_at, norm_size),
        vector(cache_kind, k_at, cache_size),
        vector(cache_kind, v_at, cache_size),
        vector(np.int64(0), slots_at, num_rows),
        vector(np.float32(0), k_scales_at, scales_size),
        vector(np.float32(0), v_scales_at, scales_size),
    )


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _rope_store_parallel(kinds, places, sizes, eps, shape):
    qkv, cos, sin, q_norm, k_norm, k_flat, v_flat, slots, k_scales, v_scales = _rope_arrays(kinds, places, sizes, shape)
    for t in prange(sizes[0]):
        expect_token(slots[min(t + 1, sizes[0] - 1)], k_flat, v_flat, shape)
        rope_store_row(qkv[t], cos[t], sin[t], q_norm, k_norm, eps, k_flat, v_flat, slots[t], k_scales, v_scales, shape)


@njit(cache=True, nogil=True, error_model="numpy")
def _rope_store_serial(kinds, places, sizes, eps, shape):
    qkv, cos, sin, q_norm, k_norm, k_flat, v_flat, slots, k_scales, v_scales = _rope_arrays(kinds, places, sizes, shape)
    for t in range(sizes[0]):
        expect_token(slots[min(t + 1, sizes[0] - 1)], k_flat, v_flat, shape)
        rope_store_row(qkv[t], cos[t], sin[t], q_norm, k_norm, eps, k_flat, v_flat, slots[t], k_scales, v_scales, shape)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.reference.elementwise`."""
    width = x.shape[-1]
    num_rows = x.numel() // width
    out = empty_rows(num_rows, width, x.dtype)
    run = _rms_norm_serial if num_rows * width <= SERIAL_ELEMENTS else _rms_norm_parallel
    x = x.contiguous()
    run(KINDS[x.dtype], KINDS[weight.dtype], x.data_ptr(), at(weight), out.data_ptr(), num_rows, width, np.float32(eps))
    return out if x.ndim == 2 else out.view(x.shape)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.reference.elementwise`; the residual is updated in place."""
    num_rows, width = x.shape
    out = empty_rows(num_rows, width, x.dtype)
    run = _add_rms_norm_serial if num_rows * width <= SERIAL_ELEMENTS else _add_rms_norm_parallel
    x = x.contiguous()
    kinds = KINDS[x.dtype], KINDS[weight.dtype]
    run(*kinds, x.data_ptr(), at(residual), at(weight), out.data_ptr(), num_rows, width, np.float32(eps))
    return out, residual


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.elementwise`."""
    return _gated(gate_up, _silu_serial, _silu_parallel)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.elementwise`."""
    return _gated(gate_up, _gelu_tanh_serial, _gelu_tanh_parallel)


def _gated(gate_up: torch.Tensor, serial: Callable[..., None], parallel: Callable[..., None]) -> torch.Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty_rows(num_rows, width, gate_up.dtype)
    run = serial if num_rows * width <= SERIAL_ELEMENTS else parallel
    gate_up = gate_up.contiguous()
    run(KINDS[out.dtype], gate_up.data_ptr(), out.data_ptr(), num_rows, width)
    return out


def rope_store_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    kv_scales: KVScales | None = None,
) -> torch.Tensor:
    """See `kernels.reference.elementwise`; qkv is overwritten, the result is a view of it, and keys are stored dimension-major."""
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    num_rows, half = cos.shape
    norms = (0, 0) if q_norm is None or k_norm is None else (at(q_norm), at(k_norm))
    scales = (0, 0) if kv_scales is None else (at(kv_scales.k), at(kv_scales.v))
    if kv_scales is None and k_cache.element_size() == 1:
        raise ValueError("a cache of 8 bits needs scales")
    kinds = KINDS[qkv.dtype], KINDS[torch.float32 if q_norm is None else q_norm.dtype], CACHE_KINDS[k_cache.dtype]
    places = at(qkv), at(cos), at(sin), *norms, at(k_cache), at(v_cache), at(slot_mapping), *scales
    sizes = num_rows, half, head_dim if norms[0] else 0, k_cache.numel(), num_kv_heads * head_dim if scales[0] else 0
    shape = (num_heads, num_kv_heads, block_size, head_dim)
    run = _rope_store_serial if qkv.numel() <= SERIAL_ELEMENTS else _rope_store_parallel
    run(kinds, places, sizes, np.float32(eps), shape)
    return qkv.as_strided((num_rows, num_heads, head_dim), (qkv.shape[1], head_dim, 1))


def read_kv(k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.reference.elementwise`; the keys are dimension-major."""
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    return k_cache.view(num_blocks, num_kv_heads, head_dim, block_size)[block, :, :, offset], v_cache[block, :, offset]
