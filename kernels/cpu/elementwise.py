"""Norms, rotary embedding with KV store, activation: compiled loops over rows, float32 inside, for float32 and bfloat16 tensors.

Every row is computed alone and in a fixed order, so results do not depend on the batch or on the number of threads. Each op has two
drivers over one row function: a parallel one, and a serial one for small batches, where waking threads would take longer than the work.
"""

import numpy as np
import torch
from numba import njit, prange

from dspark.kernels.cpu.attention import flat_scales
from dspark.kernels.cpu.attention import supports as supports_cache
from dspark.kernels.cpu.rows import empty_rows
from dspark.kernels.cpu.simd import exp_approx, store, widen
from dspark.kernels.cpu.views import as_array
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
def _rms_norm_parallel(x, weight, eps, out):
    for row in prange(x.shape[0]):
        _norm_row(x[row], weight, eps, out[row])


@njit(cache=True, nogil=True, error_model="numpy")
def _rms_norm_serial(x, weight, eps, out):
    for row in range(x.shape[0]):
        _norm_row(x[row], weight, eps, out[row])


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _add_rms_norm_parallel(x, residual, weight, eps, out):
    for row in prange(x.shape[0]):
        _add_norm_row(x[row], residual[row], weight, eps, out[row])


@njit(cache=True, nogil=True, error_model="numpy")
def _add_rms_norm_serial(x, residual, weight, eps, out):
    for row in range(x.shape[0]):
        _add_norm_row(x[row], residual[row], weight, eps, out[row])


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _silu_parallel(gate_up, out):
    width = out.shape[1]
    for row in prange(out.shape[0]):
        _silu_row(gate_up[row, :width], gate_up[row, width:], out[row])


@njit(cache=True, nogil=True, error_model="numpy")
def _silu_serial(gate_up, out):
    width = out.shape[1]
    for row in range(out.shape[0]):
        _silu_row(gate_up[row, :width], gate_up[row, width:], out[row])


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _gelu_tanh_parallel(gate_up, out):
    width = out.shape[1]
    for row in prange(out.shape[0]):
        _gelu_tanh_row(gate_up[row, :width], gate_up[row, width:], out[row])


@njit(cache=True, nogil=True, error_model="numpy")
def _gelu_tanh_serial(gate_up, out):
    width = out.shape[1]
    for row in range(out.shape[0]):
        _gelu_tanh_row(gate_up[row, :width], gate_up[row, width:], out[row])


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _rope_store_parallel(qkv, cos, sin, q_norm, k_norm, eps, k_flat, v_flat, slots, k_scales, v_scales, shape):
    for t in prange(qkv.shape[0]):
        _rope_store_row(qkv[t], cos[t], sin[t], q_norm, k_norm, eps, k_flat, v_flat, slots[t], k_scales, v_scales, shape)


@njit(cache=True, nogil=True, error_model="numpy")
def _rope_store_serial(qkv, cos, sin, q_norm, k_norm, eps, k_flat, v_flat, slots, k_scales, v_scales, shape):
    for t in range(qkv.shape[0]):
        _rope_store_row(qkv[t], cos[t], sin[t], q_norm, k_norm, eps, k_flat, v_flat, slots[t], k_scales, v_scales, shape)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.reference.elementwise`."""
    flat = x.reshape(-1, x.shape[-1])
    out = empty_rows(flat.shape[0], flat.shape[1], x.dtype)
    run = _rms_norm_serial if flat.numel() <= SERIAL_ELEMENTS else _rms_norm_parallel
    run(as_array(flat), as_array(weight), np.float32(eps), as_array(out))
    return out.view(x.shape)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.reference.elementwise`; the residual is updated in place."""
    out = empty_rows(x.shape[0], x.shape[1], x.dtype)
    run = _add_rms_norm_serial if x.numel() <= SERIAL_ELEMENTS else _add_rms_norm_parallel
    run(as_array(x), as_array(residual), as_array(weight), np.float32(eps), as_array(out))
    return out, residual


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.elementwise`."""
    out = empty_rows(gate_up.shape[0], gate_up.shape[1] // 2, gate_up.dtype)
    run = _silu_serial if out.numel() <= SERIAL_ELEMENTS else _silu_parallel
    run(as_array(gate_up), as_array(out))
    return out


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.elementwise`."""
    out = empty_rows(gate_up.shape[0], gate_up.shape[1] // 2, gate_up.dtype)
    run = _gelu_tanh_serial if out.numel() <= SERIAL_ELEMENTS else _gelu_tanh_parallel
    run(as_array(gate_up), as_array(out))
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
    rows = as_array(qkv)
    no_weight = rows.reshape(-1)[:0]
    q_weight = as_array(q_norm) if q_norm is not None else no_weight
    k_weight = as_array(k_norm) if k_norm is not None else no_weight
    shape = (num_heads, num_kv_heads, block_size, head_dim)
    run = _rope_store_serial if rows.size <= SERIAL_ELEMENTS else _rope_store_parallel
    run(
        rows, cos.numpy(), sin.numpy(), q_weight, k_weight, np.float32(eps),
        as_array(k_cache.view(-1)), as_array(v_cache.view(-1)), slot_mapping.numpy(), *flat_scales(kv_scales), shape,
    )  # fmt: skip
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
