"""Norms, rotary embedding with KV store, activation: compiled loops over rows, float32 inside, for float32 and bfloat16 tensors.

Every row is computed alone and in a fixed order, so results do not depend on the batch or on the number of threads. Each op has two
drivers over one row function: a parallel one, and a serial one for small batches, where waking threads would take longer than the work.
"""

from collections.abc import Callable

import numpy as np
import torch
from numba import njit, prange

from dspark.kernels.cpu.attention import NO_NUMBERS, flat_scales
from dspark.kernels.cpu.attention import supports as supports_cache
from dspark.kernels.cpu.rows import empty_rows
from dspark.kernels.cpu.simd import exp_approx, store, widen
from dspark.kernels.cpu.views import CACHE_KINDS, KINDS, as_array, at, matrix, vector
from dspark.kernels.facts import KernelFacts
from dspark.kernels.kv_cache import KVScales

CACHE_OPS = ("rope_store_kv", "read_kv", "copy_blocks", "copy_slots")
SERIAL_ELEMENTS = 32768
"""Up to so many elements (about 15 microseconds of work) an op runs on the calling thread."""


def supports(op: str, facts: KernelFacts) -> str | None:
    if op in CACHE_OPS:
        return supports_cache(op, facts)
    if facts.dtype not in (torch.float32, torch.bfloat16):
        return f"is compiled for float32 and bfloat16, the dtype is {str(facts.dtype).removeprefix('torch.')}"
    return None


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def _norm_row(source, weight, eps, target):
    """target = source / rms(source) * weight."""
    width = target.shape[0]
    total = np.float32(0.0)
    for i in range(width):
        value = widen(source[i])
        total += value * value
    scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
    for i in range(width):
        store(target, i, widen(source[i]) * scale * widen(weight[i]))


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def _add_norm_row(source, kept, weight, eps, target):
    """kept += source, rounded; target = kept / rms(kept) * weight."""
    width = target.shape[0]
    for i in range(width):
        store(kept, i, widen(kept[i]) + widen(source[i]))
    _norm_row(kept, weight, eps, target)


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def _silu_row(gate, up, target):
    for i in range(target.shape[0]):
        value = widen(gate[i])
        store(target, i, value / (np.float32(1.0) + exp_approx(-value)) * widen(up[i]))


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def _gelu_tanh_row(gate, up, target):
    """gelu(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x**3)), which is its tanh form with one exponential."""
    for i in range(target.shape[0]):
        value = widen(gate[i])
        inner = np.float32(1.5957691216057308) * value * (np.float32(1.0) + np.float32(0.044715) * value * value)
        store(target, i, value / (np.float32(1.0) + exp_approx(-inner)) * widen(up[i]))


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def _rotate_head(head, cos, sin):
    """Half-split rotation in place of the first 2 * len(cos) values."""
    half = cos.shape[0]
    first, second = head[:half], head[half : 2 * half]
    for i in range(half):
        a, b = widen(first[i]), widen(second[i])
        store(first, i, a * cos[i] - b * sin[i])
        store(second, i, b * cos[i] + a * sin[i])


@njit(cache=True, nogil=True, error_model="numpy")
def _store_head(head, scales, cache, start, stride):
    """One key or value into the cache: its numbers stand `stride` elements apart. scales: empty for a cache of the head's own dtype."""
    if scales.shape[0]:
        for d in range(head.shape[0]):
            store(cache, start + d * stride, widen(head[d]) / scales[d])
    else:
        for d in range(head.shape[0]):
            cache[start + d * stride] = head[d]


@njit(cache=True, nogil=True, error_model="numpy")
def _rope_store_row(row, cos, sin, q_norm, k_norm, eps, k_flat, v_flat, slot, k_scales, v_scales, shape):
    """One token: norm (when there are norm weights) and rotate q and k in place, store k dimension-major and v in plain order."""
    num_heads, num_kv_heads, block_size, head_dim = shape
    block, offset = slot // block_size, slot % block_size
    for h in range(num_heads + num_kv_heads):
        head = row[h * head_dim : (h + 1) * head_dim]
        if q_norm.shape[0]:
            _norm_row(head, q_norm if h < num_heads else k_norm, eps, head)
        _rotate_head(head, cos, sin)
    for h in range(num_kv_heads):
        channels, page = slice(h * head_dim, (h + 1) * head_dim), (block * num_kv_heads + h) * head_dim * block_size
        key = row[(num_heads + h) * head_dim : (num_heads + h + 1) * head_dim]
        _store_head(key, k_scales[channels], k_flat, page + offset, block_size)
        value = row[(num_heads + num_kv_heads + h) * head_dim : (num_heads + num_kv_heads + h + 1) * head_dim]
        _store_head(value, v_scales[channels], v_flat, page + offset * head_dim, 1)


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _rms_norm_parallel(kind, weight_kind, x_at, weight_at, out_at, num_rows, width, eps):
    x, out = matrix(kind, x_at, num_rows, width), matrix(kind, out_at, num_rows, width)
    weight = matrix(weight_kind, weight_at, 1, width)[0]
    for row in prange(num_rows):
        _norm_row(x[row], weight, eps, out[row])


@njit(cache=True, nogil=True, error_model="numpy")
def _rms_norm_serial(kind, weight_kind, x_at, weight_at, out_at, num_rows, width, eps):
    x, out = matrix(kind, x_at, num_rows, width), matrix(kind, out_at, num_rows, width)
    weight = matrix(weight_kind, weight_at, 1, width)[0]
    for row in range(num_rows):
        _norm_row(x[row], weight, eps, out[row])


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _add_rms_norm_parallel(kind, weight_kind, x_at, residual_at, weight_at, out_at, num_rows, width, eps):
    x, residual, out = (
        matrix(kind, x_at, num_rows, width),
        matrix(kind, residual_at, num_rows, width),
        matrix(kind, out_at, num_rows, width),
    )
    weight = matrix(weight_kind, weight_at, 1, width)[0]
    for row in prange(num_rows):
        _add_norm_row(x[row], residual[row], weight, eps, out[row])


@njit(cache=True, nogil=True, error_model="numpy")
def _add_rms_norm_serial(kind, weight_kind, x_at, residual_at, weight_at, out_at, num_rows, width, eps):
    x, residual, out = (
        matrix(kind, x_at, num_rows, width),
        matrix(kind, residual_at, num_rows, width),
        matrix(kind, out_at, num_rows, width),
    )
    weight = matrix(weight_kind, weight_at, 1, width)[0]
    for row in range(num_rows):
        _add_norm_row(x[row], residual[row], weight, eps, out[row])


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _silu_parallel(kind, gate_up_at, out_at, num_rows, width):
    gate_up, out = matrix(kind, gate_up_at, num_rows, 2 * width), matrix(kind, out_at, num_rows, width)
    for row in prange(num_rows):
        _silu_row(gate_up[row, :width], gate_up[row, width:], out[row])


@njit(cache=True, nogil=True, error_model="numpy")
def _silu_serial(kind, gate_up_at, out_at, num_rows, width):
    gate_up, out = matrix(kind, gate_up_at, num_rows, 2 * width), matrix(kind, out_at, num_rows, width)
    for row in range(num_rows):
        _silu_row(gate_up[row, :width], gate_up[row, width:], out[row])


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _gelu_tanh_parallel(kind, gate_up_at, out_at, num_rows, width):
    gate_up, out = matrix(kind, gate_up_at, num_rows, 2 * width), matrix(kind, out_at, num_rows, width)
    for row in prange(num_rows):
        _gelu_tanh_row(gate_up[row, :width], gate_up[row, width:], out[row])


@njit(cache=True, nogil=True, error_model="numpy")
def _gelu_tanh_serial(kind, gate_up_at, out_at, num_rows, width):
    gate_up, out = matrix(kind, gate_up_at, num_rows, 2 * width), matrix(kind, out_at, num_rows, width)
    for row in range(num_rows):
        _gelu_tanh_row(gate_up[row, :width], gate_up[row, width:], out[row])


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _rope_store_parallel(
    kind,
    cache_kind,
    qkv_at,
    cos_at,
    sin_at,
    k_at,
    v_at,
    slots_at,
    cache_size,
    num_rows,
    half,
    q_norm,
    k_norm,
    eps,
    k_scales,
    v_scales,
    shape,
):
    qkv, slots = matrix(kind, qkv_at, num_rows, (shape[0] + 2 * shape[1]) * shape[3]), vector(np.int64(0), slots_at, num_rows)
    cos, sin = matrix(np.float32(0), cos_at, num_rows, half), matrix(np.float32(0), sin_at, num_rows, half)
    k_flat, v_flat = vector(cache_kind, k_at, cache_size), vector(cache_kind, v_at, cache_size)
    for t in prange(num_rows):
        _rope_store_row(qkv[t], cos[t], sin[t], q_norm, k_norm, eps, k_flat, v_flat, slots[t], k_scales, v_scales, shape)


@njit(cache=True, nogil=True, error_model="numpy")
def _rope_store_serial(
    kind,
    cache_kind,
    qkv_at,
    cos_at,
    sin_at,
    k_at,
    v_at,
    slots_at,
    cache_size,
    num_rows,
    half,
    q_norm,
    k_norm,
    eps,
    k_scales,
    v_scales,
    shape,
):
    qkv, slots = matrix(kind, qkv_at, num_rows, (shape[0] + 2 * shape[1]) * shape[3]), vector(np.int64(0), slots_at, num_rows)
    cos, sin = matrix(np.float32(0), cos_at, num_rows, half), matrix(np.float32(0), sin_at, num_rows, half)
    k_flat, v_flat = vector(cache_kind, k_at, cache_size), vector(cache_kind, v_at, cache_size)
    for t in range(num_rows):
        _rope_store_row(qkv[t], cos[t], sin[t], q_norm, k_norm, eps, k_flat, v_flat, slots[t], k_scales, v_scales, shape)


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
    kinds = KINDS[qkv.dtype], CACHE_KINDS[k_cache.dtype]
    places = at(qkv), at(cos), at(sin), at(k_cache), at(v_cache), at(slot_mapping)
    q_weight = as_array(q_norm) if q_norm is not None else NO_NUMBERS
    k_weight = as_array(k_norm) if k_norm is not None else NO_NUMBERS
    shape = (num_heads, num_kv_heads, block_size, head_dim)
    run = _rope_store_serial if qkv.numel() <= SERIAL_ELEMENTS else _rope_store_parallel
    run(*kinds, *places, k_cache.numel(), num_rows, half, q_weight, k_weight, np.float32(eps), *flat_scales(kv_scales), shape)
    return qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))


def read_kv(k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.reference.elementwise`; the keys are dimension-major."""
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    return k_cache.view(num_blocks, num_kv_heads, head_dim, block_size)[block, :, :, offset], v_cache[block, :, offset]


def copy_blocks(k_cache: torch.Tensor, v_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """See `kernels.reference.elementwise`: whole blocks, so the order inside does not matter."""
    k_cache[target] = k_cache[source]
    v_cache[target] = v_cache[source]


def copy_slots(k_cache: torch.Tensor, v_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """See `kernels.reference.elementwise`; the keys are dimension-major."""
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    blocks, offsets = target // block_size, target % block_size
    k, v = read_kv(k_cache, v_cache, source)
    k_cache.view(num_blocks, num_kv_heads, head_dim, block_size)[blocks, :, :, offsets] = k
    v_cache[blocks, :, offsets] = v
