"""Paged attention in plain torch, one sequence at a time."""

import torch

from dspark.kernels.batch import AttentionBatch
from dspark.kernels.kv_cache import KVScales, from_codes


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
    With a softcap c, scores s become c * tanh(s / c) before the mask; 0 is none. kv_scales: of an 8-bit cache (see `kernels.kv_cache`).
    A node of a draft tree sees the keys before the tree and its own path (`TreeMask`); a window then counts positions, not keys.
    """
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    num_heads = q.shape[1]
    group = num_heads // num_kv_heads
    out = torch.empty_like(q)
    starts, lens = batch.query_start.tolist(), batch.context_lens.tolist()
    for i, context_len in enumerate(lens):
        rows = slice(starts[i], starts[i + 1])
        num_queries = rows.stop - rows.start
        blocks = batch.block_tables[i, : -(-context_len // block_size)].long()
        pages = (cache[blocks].transpose(1, 2).reshape(-1, num_kv_heads, head_dim) for cache in (k_cache, v_cache))
        keys, values = (page[:context_len].float() for page in pages)
        if kv_scales is not None:
            keys, values = from_codes(keys, kv_scales.k), from_codes(values, kv_scales.v)
        queries = q[rows].float().view(num_queries, num_kv_heads, group, head_dim)
        scores = torch.einsum("qhgd,khd->hgqk", queries, keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        probs = torch.softmax(scores.masked_fill(_hidden(batch, i, rows, context_len, window), float("-inf")), -1)
        out[rows] = torch.einsum("hgqk,khd->qhgd", probs, values).reshape(num_queries, num_heads, head_dim).to(q.dtype)
    return out.flatten(1)


def _hidden(batch: AttentionBatch, sequence: int, rows: slice, context_len: int, window: int | None) -> torch.Tensor:
    """bool [queries, context_len]: the keys that each query of a sequence does not see."""
    num_queries, device = rows.stop - rows.start, batch.context_lens.device
    query = torch.arange(context_len - num_queries, context_len, device=device)[:, None]
    key = torch.arange(context_len, device=device)[None]
    hidden, key_pos, query_pos = key > query, key, query
    if batch.tree is not None:
        start = int(batch.tree.start[sequence])
        on_path = batch.tree.visible[rows, None] >> (key - start).clamp(min=0) & 1
        hidden = hidden | (key >= start) & (on_path == 0)
        query_pos = batch.positions[rows, None]
        key_pos = torch.cat([torch.arange(context_len - num_queries, device=device), batch.positions[rows]])[None]
    return hidden if window is None else hidden | (key_pos <= query_pos - window)
