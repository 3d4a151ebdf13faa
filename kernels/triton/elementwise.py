"""Norms, rope with KV store, activation and block copy on Triton: names and signatures of `kernels.reference.elementwise`."""

from typing import Any

import torch

from dspark.kernels.facts import KernelFacts
from dspark.kernels.kv_cache import KVScales
from dspark.kernels.reference.elementwise import read_kv as read_kv  # plain torch, and this package keeps the reference's cache layout
from dspark.kernels.triton import launch as launcher
from dspark.kernels.triton import tiles


def supports(op: str, facts: KernelFacts) -> str | None:
    """None, or why these kernels do not take the op."""
    return launcher.decline(facts) or (launcher.decline_head_dim(facts) if op == "rope_store_kv" else None)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] / rms(x) * weight [H]."""
    from dspark.kernels.triton.elementwise_kernels import rms_norm_kernel

    hidden = x.shape[-1]
    rows = _rows(x)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    block = tiles.next_power_of_two(hidden)
    grid = (rows.shape[0],)
    strides = rows.stride(0), out.stride(0)
    launcher.launch(rms_norm_kernel, grid, rows, weight, out, hidden, *strides, eps, BLOCK=block, num_warps=tiles.row_warps(block))
    return out.view(x.shape)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """residual += x, in place and rounded to its dtype; returns (rms_norm(residual), residual). Both [T, H]."""
    from dspark.kernels.triton.elementwise_kernels import add_rms_norm_kernel

    num_tokens, hidden = x.shape
    x, out = _rows(x), torch.empty_like(x, memory_format=torch.contiguous_format)
    launcher.require(residual.stride(-1) == 1, lambda: f"the residual's rows must be contiguous, strides are {residual.stride()}")
    block = tiles.next_power_of_two(hidden)
    strides = x.stride(0), residual.stride(0), out.stride(0)
    tensors = x, residual, weight, out
    warps = tiles.row_warps(block)
    launcher.launch(add_rms_norm_kernel, (num_tokens,), *tensors, hidden, *strides, eps, BLOCK=block, num_warps=warps)
    return out, residual


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * I], gate first -> silu(gate) * up [T, I]."""
    from dspark.kernels.triton.elementwise_kernels import silu_and_mul_kernel

    return _activate(silu_and_mul_kernel, gate_up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * I], gate first -> gelu(gate) * up [T, I], GELU in its tanh form."""
    from dspark.kernels.triton.elementwise_kernels import gelu_tanh_and_mul_kernel

    return _activate(gelu_tanh_and_mul_kernel, gate_up)


def _activate(kernel: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate_up = _rows(gate_up)
    num_tokens, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, intermediate, dtype=gate_up.dtype, device=gate_up.device)
    block = min(tiles.ACTIVATION_BLOCK, tiles.next_power_of_two(intermediate))
    grid = (num_tokens, -(-intermediate // block))
    strides = gate_up.stride(0), out.stride(0)
    launcher.launch(kernel, grid, gate_up, out, intermediate, *strides, BLOCK=block, num_warps=4)
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
    """Norm (when given) and rotate q and k, store k and v into the cache, return q [T, num_heads, D].

    qkv [T, (num_heads + 2 * num_kv_heads) * D]; cos, sin float32 [T, R / 2], R <= D; caches [num_blocks, num_kv_heads, block_size, D];
    slot_mapping int64 [T]. A token whose slot is negative is not stored (padding of a captured graph). kv_scales: of an 8-bit cache.
    """
    from dspark.kernels.triton.elementwise_kernels import rope_store_kv_kernel

    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    qkv, cos, sin = _rows(qkv), _rows(cos), _rows(sin)
    num_tokens = qkv.shape[0]
    total_heads = num_heads + 2 * num_kv_heads
    launcher.require(
        k_cache.stride() == v_cache.stride() and k_cache.stride(-1) == 1,
        lambda: f"key and value cache must have the same strides and contiguous heads: {k_cache.stride()}, {v_cache.stride()}",
    )
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    block_d = tiles.next_power_of_two(head_dim)
    block_heads = tiles.rope_heads(block_d, total_heads)
    normed = q_norm is not None and k_norm is not None
    norms = (q_norm, k_norm) if normed else (qkv, qkv)  # never read without QK_NORM
    kind, k_cache, v_cache = launcher.cache_codes(k_cache, v_cache)
    slot_mapping = launcher.vector(slot_mapping)
    scales = (cos, cos) if kv_scales is None else (kv_scales.k, kv_scales.v)  # never read for a cache of numbers
    launcher.launch(
        rope_store_kv_kernel,
        (num_tokens, -(-total_heads // block_heads)),
        *(qkv, cos, sin, *norms, q, k_cache, v_cache, *scales, slot_mapping),
        *(qkv.stride(0), cos.stride(0), sin.stride(0), *k_cache.stride()[:3], num_heads, num_kv_heads, eps),
        HEAD_DIM=head_dim,
        HALF=cos.shape[-1],
        CACHE_BLOCK_SIZE=block_size,
        BLOCK_HEADS=block_heads,
        BLOCK_D=block_d,
        QK_NORM=normed,
        CACHE=kind,
        num_warps=4,
    )
    return q


def copy_blocks(k_cache: torch.Tensor, v_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy whole KV blocks, source and target int64 [n] block ids (copy-on-write). Sources and targets do not overlap."""
    from dspark.kernels.triton.elementwise_kernels import copy_blocks_kernel

    launcher.require(k_cache.is_contiguous() and v_cache.is_contiguous(), lambda: "copy_blocks needs contiguous caches")
    _, k_cache, v_cache = launcher.cache_codes(k_cache, v_cache)
    source, target = launcher.vector(source), launcher.vector(target)
    elements = k_cache[0].numel()
    grid = (source.shape[0], -(-elements // tiles.COPY_BLOCK))
    stride = k_cache.stride(0)
    launcher.launch(copy_blocks_kernel, grid, k_cache, v_cache, source, target, elements, stride, BLOCK=tiles.COPY_BLOCK, num_warps=8)


def copy_slots(k_cache: torch.Tensor, v_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy keys and values of single tokens, source and target int64 [n] slots; see `kernels.reference.elementwise`.
    Within a launch all are read before any is written, and launches follow the list."""
    from dspark.kernels.triton.elementwise_kernels import copy_slots_kernel

    launcher.require(k_cache.stride() == v_cache.stride(), lambda: "key and value cache must have the same strides")
    _, k_cache, v_cache = launcher.cache_codes(k_cache, v_cache)
    source, target = launcher.vector(source), launcher.vector(target)
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    grid = (num_kv_heads, -(-head_dim // tiles.COPY_SLOT_DIMS))
    for start in range(0, source.shape[0], tiles.COPY_SLOTS):
        pairs = source[start : start + tiles.COPY_SLOTS], target[start : start + tiles.COPY_SLOTS]
        launcher.launch(
            copy_slots_kernel,
            grid,
            *(k_cache, v_cache, *pairs, pairs[0].shape[0], *k_cache.stride()[:3]),
            CACHE_BLOCK_SIZE=block_size,
            HEAD_DIM=head_dim,
            PAIRS=tiles.COPY_SLOTS,
            BLOCK_D=tiles.COPY_SLOT_DIMS,
            num_warps=4,
        )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, columns] with contiguous columns; copies only what has none."""
    rows = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    return rows if rows.stride(-1) == 1 else rows.contiguous()
