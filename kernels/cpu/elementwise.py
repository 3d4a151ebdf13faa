"""Norms, rotary embedding with KV store, activation: compiled loops over rows, float32 inside, for float32 and bfloat16 tensors.

Every row is computed alone and in a fixed order, so results do not depend on the batch or on the number of threads.
"""

import numpy as np
import torch
from numba import njit, prange

from dspark.kernels.cpu.attention import supports as supports_cache
from dspark.kernels.cpu.simd import exp_approx, store, widen
from dspark.kernels.cpu.views import as_array
from dspark.kernels.facts import KernelFacts


def supports(op: str, facts: KernelFacts) -> str | None:
    if op in ("rope_store_kv", "copy_blocks"):
        return supports_cache(op, facts)
    if facts.dtype not in (torch.float32, torch.bfloat16):
        return f"is compiled for float32 and bfloat16, the dtype is {str(facts.dtype).removeprefix('torch.')}"
    return None


@njit(parallel=True, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def _rms_norm(x, weight, eps, out):
    num_rows, width = x.shape
    for row in prange(num_rows):
        source, target = x[row], out[row]
        total = np.float32(0.0)
        for i in range(width):
            value = widen(source[i])
            total += value * value
        scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            store(target, i, widen(source[i]) * scale * widen(weight[i]))


@njit(parallel=True, cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def _add_rms_norm(x, residual, weight, eps, out):
    num_rows, width = x.shape
    for row in prange(num_rows):
        source, kept, target = x[row], residual[row], out[row]
        total = np.float32(0.0)
        for i in range(width):
            store(kept, i, widen(kept[i]) + widen(source[i]))
        for i in range(width):
            value = widen(kept[i])
            total += value * value
        scale = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            store(target, i, widen(kept[i]) * scale * widen(weight[i]))


@njit(parallel=True, cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def _silu_and_mul(gate_up, out):
    num_rows, width = out.shape
    for row in prange(num_rows):
        source, target = gate_up[row], out[row]
        for i in range(width):
            gate = widen(source[i])
            store(target, i, gate / (np.float32(1.0) + exp_approx(-gate)) * widen(source[width + i]))


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _norm_head(head, head_dim, weight, eps, buffer):
    """RMS norm of one head into buffer, rounded as the stored dtype would be."""
    total = np.float32(0.0)
    for d in range(head_dim):
        value = widen(head[d])
        total += value * value
    scale = np.float32(1.0) / np.sqrt(total / np.float32(head_dim) + eps)
    for d in range(head_dim):
        store(head, d, widen(head[d]) * scale * widen(weight[d]))
    for d in range(head_dim):
        buffer[d] = widen(head[d])


@njit(parallel=True, cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def _rope_store(qkv, cos, sin, q_norm, k_norm, has_norm, eps, k_flat, v_flat, slots, shape):
    """qkv 2-D [T, width], rotated in place. shape: num_heads, num_kv_heads, block_size, head_dim."""
    num_heads, num_kv_heads, block_size, head_dim = shape
    half = cos.shape[1]
    for t in prange(qkv.shape[0]):
        row = qkv[t]
        buffer = np.empty(head_dim, np.float32)
        block, offset = slots[t] // block_size, slots[t] % block_size
        for head in range(num_heads + num_kv_heads):
            values = row[head * head_dim : (head + 1) * head_dim]
            if has_norm:
                _norm_head(values, head_dim, q_norm if head < num_heads else k_norm, eps, buffer)
            else:
                for d in range(head_dim):
                    buffer[d] = widen(values[d])
            for i in range(half):
                first, second = buffer[i], buffer[half + i]
                store(values, i, first * cos[t, i] - second * sin[t, i])
                store(values, half + i, second * cos[t, i] + first * sin[t, i])
            if head >= num_heads:
                base = ((block * num_kv_heads + head - num_heads) * head_dim) * block_size + offset
                for d in range(head_dim):
                    k_flat[base + d * block_size] = values[d]
        for head in range(num_kv_heads):
            values = row[(num_heads + num_kv_heads + head) * head_dim : (num_heads + num_kv_heads + head + 1) * head_dim]
            base = ((block * num_kv_heads + head) * block_size + offset) * head_dim
            for d in range(head_dim):
                v_flat[base + d] = values[d]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.reference.elementwise`."""
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(flat)
    _rms_norm(as_array(flat), as_array(weight), np.float32(eps), as_array(out))
    return out.view(x.shape)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.reference.elementwise`; the residual is updated in place."""
    out = torch.empty_like(x)
    _add_rms_norm(as_array(x), as_array(residual), as_array(weight), np.float32(eps), as_array(out))
    return out, residual


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.elementwise`."""
    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype)
    _silu_and_mul(as_array(gate_up), as_array(out))
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
) -> torch.Tensor:
    """See `kernels.reference.elementwise`; qkv is overwritten, the result is a view of it, and keys are stored dimension-major."""
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    rows = as_array(qkv)
    if rows.shape[0]:
        has_norm = q_norm is not None and k_norm is not None
        q_weight = as_array(q_norm) if q_norm is not None else rows[0, :0]
        k_weight = as_array(k_norm) if k_norm is not None else rows[0, :0]
        shape = (num_heads, num_kv_heads, block_size, head_dim)
        _rope_store(
            rows, cos.numpy(), sin.numpy(), q_weight, k_weight, has_norm, np.float32(eps),
            as_array(k_cache.view(-1)), as_array(v_cache.view(-1)), slot_mapping.numpy(), shape,
        )  # fmt: skip
    return qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))


def copy_blocks(k_cache: torch.Tensor, v_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """See `kernels.reference.elementwise`: whole blocks, so the order inside does not matter."""
    k_cache[target] = k_cache[source]
    v_cache[target] = v_cache[source]
