"""Jitted attention over the paged KV cache: a decode and a prefill kernel around one inner loop over key tiles.

Rows of a tile are query heads that share one KV head (GQA packed into the tile): row r is query token r // GROUP, head r % GROUP.
A key tile spans pages: each key's block id is gathered from the block table, so any page size works. Table entries and slots at or past
the last key are never read. Scores and softmax are float32 in base 2 (`scale` comes multiplied by log2(e)).

CACHE says what the pages hold: "number", or 8-bit "int8" or "fp8" with scales [KV heads, HEAD_DIM]. Those stand outside the loop: queries
are multiplied by the scales of the keys, results by those of the values; in the loop 8 bits are widened in registers.

TREE says that the step has draft trees (see `kernels.batch.TreeMask`); a node is one of several queries, so the decode kernel has none.
PATH is the form of TREE in which a node's arithmetic is that of plain decoding: it is the only query of its program, and the keys of its
path are gathered in the order of their positions.

SPLIT: a context is shared among programs, `split_keys` keys each, counted from key 0; out and stats then take parts (see
`attention_merge_kernels`). CHUNK: one program merges parts of as many keys, which gives the bits of a split of that size; 0 for one part.
"""

import triton
import triton.language as tl

from dspark.kernels.triton.attention_loop_kernels import attend, attend_chunks
from dspark.kernels.triton.attention_merge_kernels import first_key_of, store_rows, times_scale


@triton.jit
def decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    stats_ptr,
    query_start_ptr,
    context_len_ptr,
    table_ptr,
    q_token_stride,
    q_head_stride,
    num_heads,
    table_stride,
    cache_block_stride,
    cache_head_stride,
    cache_slot_stride,
    scale,
    split_keys,
    split_rows,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CACHE_BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CACHE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (sequences, KV heads, splits), at most one query token a sequence: its GROUP query heads are the rows of the tile."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    token = tl.load(query_start_ptr + sequence).to(tl.int64)
    has_query = tl.load(query_start_ptr + sequence + 1) > token
    end_key = tl.load(context_len_ptr + sequence)
    row = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + row
    row_mask = (row < GROUP) & has_query
    row_at = token * num_heads + head
    position = end_key - 1 + tl.zeros([BLOCK_M], tl.int32)
    first_key = first_key_of(end_key - 1, WINDOW, BLOCK_N)
    if SPLIT:
        split_start = (first_key // split_keys + tl.program_id(2)) * split_keys
        if split_start >= end_key:
            return
        first_key = tl.maximum(first_key, split_start)
        end_key = tl.minimum(end_key, split_start + split_keys)
        row_at += tl.program_id(2).to(tl.int64) * split_rows
    dim = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + token * q_token_stride + head[:, None] * q_head_stride + dim[None, :], mask=mask, other=0.0)
    q = times_scale(q, k_scale_ptr + kv_head * HEAD_DIM, HEAD_DIM, BLOCK_D, CACHE)
    acc, total, peak = attend(
        q,
        position,
        position,
        position,
        end_key,
        context_len_ptr,
        first_key,
        end_key,
        table_ptr + sequence * table_stride,
        k_cache_ptr + kv_head * cache_head_stride,
        v_cache_ptr + kv_head * cache_head_stride,
        cache_block_stride,
        cache_slot_stride,
        scale,
        WINDOW,
        SOFTCAP,
        CACHE_BLOCK_SIZE,
        HEAD_DIM,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        CACHE,
        False,
        False,
    )
    scale_ptr = v_scale_ptr + kv_head * HEAD_DIM
    store_rows(acc, total, peak, out_ptr, stats_ptr, scale_ptr, row_at, row_mask, HEAD_DIM, BLOCK_D, CACHE, SPLIT)


@triton.jit
def prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    stats_ptr,
    query_start_ptr,
    context_len_ptr,
    table_ptr,
    position_ptr,
    visible_ptr,
    tree_start_ptr,
    q_token_stride,
    q_head_stride,
    num_heads,
    table_stride,
    cache_block_stride,
    cache_head_stride,
    cache_slot_stride,
    scale,
    split_keys,
    split_rows,
    num_splits,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CACHE_BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CACHE: tl.constexpr,
    TREE: tl.constexpr,
    PATH: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (query tiles of the longest sequence, KV heads, sequences * num_splits): BLOCK_M // GROUP query tokens of a sequence a program.

    Tiles past a sequence's own queries return at once. The last tiles, which see the most keys, start first. With PATH the tiles of the
    queries before a tree come first and then a tile for each node.
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = (tl.program_id(2) // num_splits).to(tl.int64)
    start = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - start
    context_len = tl.load(context_len_ptr + sequence)
    first_query = tile * QUERIES
    end_query = tl.minimum(first_query + QUERIES, num_queries)
    tree_start = context_len
    if TREE or PATH:
        tree_start = tl.load(tree_start_ptr + sequence)
    if PATH:
        causal = num_queries - (context_len - tree_start)
        node_tile = tile - tl.cdiv(causal, QUERIES)
        first_query = tl.where(node_tile >= 0, causal + node_tile, first_query)
        end_query = tl.where(node_tile >= 0, first_query + 1, tl.minimum(end_query, causal))
    if first_query < num_queries:
        row = tl.arange(0, BLOCK_M)
        dim = tl.arange(0, BLOCK_D)
        query = first_query + row // GROUP
        head = kv_head * GROUP + row % GROUP
        row_mask = (row < QUERIES * GROUP) & (query < end_query)
        token = (start + query).to(tl.int64)
        first_index = context_len - num_queries + first_query
        end_key = tl.minimum(first_index + QUERIES, context_len)
        first_position = first_index
        node_position_ptr = position_ptr
        if PATH:
            first_index = tl.load(position_ptr + start + first_query).to(tl.int32)
            end_key = first_index + end_query - first_query
            first_position = first_index
        index = first_index + row // GROUP
        position, visible = index, index
        if TREE:
            position = tl.load(position_ptr + token, mask=query < num_queries, other=0).to(tl.int32)
            visible = tl.load(visible_ptr + token, mask=query < num_queries, other=0)
            node_position_ptr = position_ptr + start + num_queries - (context_len - tree_start)
            first_position = tl.minimum(first_index, tree_start)  # where the first nodes stand
        if PATH:
            visible = tl.load(visible_ptr + start + first_query)
        first_key = first_key_of(first_position, WINDOW, BLOCK_N)
        split_rows_before = 0
        if SPLIT:
            split = tl.program_id(2) % num_splits
            split_start = (first_key // split_keys + split) * split_keys
            row_mask = row_mask & (split_start < end_key)
            first_key = tl.maximum(first_key, split_start)
            end_key = tl.minimum(end_key, split_start + split_keys)
            split_rows_before = split.to(tl.int64) * split_rows
        mask = row_mask[:, None] & (dim < HEAD_DIM)[None, :]
        q_at = q_ptr + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
        q = tl.load(q_at, mask=mask, other=0.0)
        q = times_scale(q, k_scale_ptr + kv_head * HEAD_DIM, HEAD_DIM, BLOCK_D, CACHE)
        acc, total, peak = attend_chunks(
            q,
            index,
            position,
            visible,
            tree_start,
            node_position_ptr,
            first_key,
            end_key,
            table_ptr + sequence * table_stride,
            k_cache_ptr + kv_head * cache_head_stride,
            v_cache_ptr + kv_head * cache_head_stride,
            cache_block_stride,
            cache_slot_stride,
            scale,
            WINDOW,
            SOFTCAP,
            CACHE_BLOCK_SIZE,
            HEAD_DIM,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            CACHE,
            TREE,
            PATH,
            CHUNK,
        )
        row_at = token * num_heads + head + split_rows_before  # here, not before the loop, whose registers are precious
        scale_ptr = v_scale_ptr + kv_head * HEAD_DIM
        store_rows(acc, total, peak, out_ptr, stats_ptr, scale_ptr, row_at, row_mask, HEAD_DIM, BLOCK_D, CACHE, SPLIT)
