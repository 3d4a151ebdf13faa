"""Attention over the paged KV cache on Triton: name and signature of `kernels.reference.attention`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from dspark.kernels.batch import AttentionBatch
from dspark.kernels.facts import KernelFacts
from dspark.kernels.kv_cache import KVScales
from dspark.kernels.triton import attention_plan, tiles
from dspark.kernels.triton import launch as launcher

if TYPE_CHECKING:
    from dspark.kernels.triton.tuning.book import TileBook

_MULTIPROCESSORS = 132
"""Taken where there is no GPU to ask: interpreted runs, and compiling ahead of time."""


def supports(op: str, facts: KernelFacts) -> str | None:
    """None, or why these kernels do not take the op."""
    return launcher.decline(facts) or launcher.decline_head_dim(facts)


def form(op: str, facts: KernelFacts) -> Callable[..., torch.Tensor]:
    """The function that a run takes."""
    if facts.deterministic:
        return deterministic_paged_attention
    return paged_attention if facts.tiles is None else partial(paged_attention, tiles_of_run=facts.tiles)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float = 0.0,
    kv_scales: KVScales | None = None,
    tiles_of_run: TileBook | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, num_heads, D] over the pages -> [T, num_heads * D], dtype of q.

    Caches [num_blocks, num_kv_heads, block_size, D], already holding this step's keys and values. Query j (of n) of a sequence with
    context length c stands at position c - n + j and sees the keys up to and including its own; with a window, the last `window` of them.
    With a softcap c, scores s become c * tanh(s / c) before the mask; 0 is none. kv_scales: of an 8-bit cache; keys times their scales
    are then rounded to q's dtype on the side of the query.
    A node of a draft tree sees the keys before the tree and its own path; a window then counts positions.
    A step of single-token queries takes the decode kernel, any other the prefill kernel (which runs its decode rows too). Where a batch
    has too few programs for the device, long contexts are shared among several. tiles_of_run: who is asked how, None for the shape alone.
    """
    shape = shape_of(q, k_cache, batch, window, kv_scales)
    plan = attention_plan.plan(shape) if tiles_of_run is None else tiles_of_run.attention(shape)
    return run(plan, q, k_cache, v_cache, batch, scale, window, softcap, kv_scales)


def deterministic_paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float = 0.0,
    kv_scales: KVScales | None = None,
) -> torch.Tensor:
    """`paged_attention`, with the same bits for a token whatever else is in its step, and whether it is computed in a prompt, in a chunk
    of one, alone, or as a node of a draft tree."""
    plan = attention_plan.deterministic_plan(shape_of(q, k_cache, batch, window, kv_scales))
    return run(plan, q, k_cache, v_cache, batch, scale, window, softcap, kv_scales)


def run(
    plan: attention_plan.AttentionPlan,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float = 0.0,
    kv_scales: KVScales | None = None,
) -> torch.Tensor:
    """`paged_attention` in the form that a plan says."""
    from dspark.kernels.triton.attention_kernels import decode_kernel, prefill_kernel
    from dspark.kernels.triton.attention_merge_kernels import merge_kernel

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
    rows, tile, split = num_tokens * num_heads, plan.tile, plan.num_splits > 1
    target = stats = out  # without a split no stats are written
    if split:
        target = torch.empty(plan.num_splits, rows, head_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(plan.num_splits, rows, 2, dtype=torch.float32, device=q.device)
    tree = batch.tree
    tree_start = batch.query_start if tree is None else tree.start  # never read without one
    shared: dict[str, Any] = {"GROUP": group, "WINDOW": window or 0, "HEAD_DIM": head_dim, "BLOCK_N": tile.keys, "CACHE": kind}
    shared |= {"BLOCK_D": block_of(head_dim), **({} if plan.fused else {"enable_fp_fusion": False})}
    own: dict[str, Any] = {"SOFTCAP": float(softcap), "CACHE_BLOCK_SIZE": block_size, "BLOCK_M": tile.rows, "SPLIT": split}
    trees: tuple[torch.Tensor, ...] = ()
    splits: tuple[int, ...] = (plan.split_keys, rows)
    if plan.decode:
        kernel, grid = decode_kernel, (batch.num_sequences, num_kv_heads, plan.num_splits)
    else:
        kernel, grid = prefill_kernel, (plan.query_tiles, num_kv_heads, batch.num_sequences * plan.num_splits)
        trees = (batch.positions, batch.positions if tree is None else tree.visible, tree_start)
        splits += (plan.num_splits,)
        own |= {"TREE": tree is not None and not plan.path, "PATH": plan.path, "CHUNK": plan.chunk}
    launcher.launch(
        kernel,
        grid,
        *(q, k_cache, v_cache, *scales, target, stats, batch.query_start, batch.context_lens, batch.block_tables, *trees),
        *(q.stride(0), q.stride(1), num_heads, batch.block_tables.stride(0), *k_cache.stride()[:3]),
        scale * math.log2(math.e),
        *splits,
        **shared,
        **own,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if split:
        launcher.launch(
            merge_kernel,
            (batch.max_query_len, num_heads, batch.num_sequences),
            *(target, stats, scales[1], out, batch.query_start, batch.context_lens, tree_start, plan.split_keys, rows),
            **shared,
            QUERIES=1 if plan.decode else tile.rows // group,
            TREE=tree is not None,
            num_warps=1,
        )
    return out


def shape_of(
    q: torch.Tensor, k_cache: torch.Tensor, batch: AttentionBatch, window: int | None, kv_scales: KVScales | None
) -> attention_plan.AttentionShape:
    """What a plan for this step follows from."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    return attention_plan.AttentionShape(
        num_tokens=num_tokens,
        num_sequences=batch.num_sequences,
        max_query_len=batch.max_query_len,
        max_context_len=batch.max_context_len,
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        block_d=block_of(head_dim),
        itemsize=q.itemsize,
        cache="number" if kv_scales is None else launcher.cache_codes(k_cache, k_cache)[0],
        window=window,
        has_tree=batch.tree is not None,
        multiprocessors=_multiprocessors(q.device),
    )


def block_of(head_dim: int) -> int:
    """Dimensions that a kernel holds of a head: a power of two, as many as a matrix instruction has at least."""
    return max(16, tiles.next_power_of_two(head_dim))


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _MULTIPROCESSORS
