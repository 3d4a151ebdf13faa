"""Attention over the paged KV cache on Triton: name and signature of `kernels.reference.attention`."""

import math
from typing import Any

import torch

from dspark.kernels.batch import AttentionBatch
from dspark.kernels.facts import KernelFacts
from dspark.kernels.kv_cache import KVScales
from dspark.kernels.triton import launch as launcher
from dspark.kernels.triton import tiles


def supports(op: str, facts: KernelFacts) -> str | None:
    """None, or why these kernels do not take the op."""
    if facts.deterministic:
        return "the tile of a row depends on the longest query of its batch, so deterministic runs decline it"
    return launcher.decline(facts) or launcher.decline_head_dim(facts)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float = 0.0,
    kv_scales: KVScales | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, num_heads, D] over the pages -> [T, num_heads * D], dtype of q.

    Caches [num_blocks, num_kv_heads, block_size, D], already holding this step's keys and values. Query j (of n) of a sequence with
    context length c stands at position c - n + j and sees the keys up to and including its own; with a window, the last `window` of them.
    With a softcap c, scores s become c * tanh(s / c) before the mask; 0 is none. kv_scales: of an 8-bit cache; keys times their scales
    are then rounded to q's dtype on the side of the query.
    A node of a draft tree sees the keys before the tree and its own path; a window then counts positions.
    A step of single-token queries takes the decode kernel, any other the prefill kernel (which runs its decode rows too).
    """
    from dspark.kernels.triton.attention_kernels import decode_kernel, prefill_kernel

    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    launcher.require(
        k_cache.stride() == v_cache.stride() and k_cache.stride(-1) == 1,
        lambda: f"key and value cache must have the same strides and contiguous heads: {k_cache.stride()}, {v_cache.stride()}",
    )
    launcher.require(batch.block_tables.stride(-1) == 1, lambda: "block tables must have contiguous rows")
    q = q if q.stride(-1) == 1 else q.contiguous()
    kind, k_cache, v_cache = launcher.cache_codes(k_cache, v_cache)
    scales = (q, q) if kv_scales is None else (kv_scales.k, kv_scales.v)  # never read for a cache of numbers
    out = torch.empty(num_tokens, num_heads * head_dim, dtype=q.dtype, device=q.device)
    block_d = max(16, tiles.next_power_of_two(head_dim))
    decode = batch.max_query_len <= 1
    if decode:
        kernel, tile = decode_kernel, tiles.decode_tile(group, block_d, q.itemsize)
        grid: tuple[int, ...] = (batch.num_sequences, num_kv_heads)
        trees: tuple[torch.Tensor, ...] = ()
        config: dict[str, Any] = {}
    else:
        kernel, tile = prefill_kernel, tiles.prefill_tile(batch.max_query_len, group, block_d, q.itemsize, kv_scales is not None)
        grid = (-(-batch.max_query_len // (tile.rows // group)), num_kv_heads, batch.num_sequences)
        tree = batch.tree
        trees = (batch.positions, *((batch.positions, batch.query_start) if tree is None else (tree.visible, tree.start)))
        config = {"TREE": tree is not None}  # without one the last two are never read
    launcher.launch(
        kernel,
        grid,
        *(q, k_cache, v_cache, *scales, out, batch.query_start, batch.context_lens, batch.block_tables, *trees),
        *(q.stride(0), q.stride(1), out.stride(0), batch.block_tables.stride(0), *k_cache.stride()[:3]),
        scale * math.log2(math.e),
        GROUP=group,
        WINDOW=window or 0,
        SOFTCAP=float(softcap),
        CACHE_BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        BLOCK_D=block_d,
        CACHE=kind,
        **config,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
