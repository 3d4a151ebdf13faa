"""Jitted inner loop of attention over the paged KV cache: online softmax of a tile of queries over key tiles.

The constants are explained in `attention_kernels`.
"""

import triton
import triton.language as tl

from dspark.kernels.triton.attention_merge_kernels import merge_parts
from dspark.kernels.triton.codes_kernels import widen


@triton.jit
def _on_path(depth, path):
    """The node at each depth [BLOCK_N] of a path, a mask of 63 bits; 0 past its end."""
    chosen = depth * 0
    next_depth = tl.sum(chosen, 0)
    for node in range(63):
        is_on = ((path >> node) & 1).to(tl.int32)
        chosen = tl.where((depth == next_depth) & (is_on != 0), node, chosen)
        next_depth += is_on
    return chosen


@triton.jit
def attend(
    q,
    query_index,
    query_position,
    query_visible,
    tree_start,
    node_position_ptr,
    first_key,
    end_key,
    table_ptr,
    k_ptr,
    v_ptr,
    cache_block_stride,
    cache_slot_stride,
    scale,
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
):
    """Online softmax of q [BLOCK_M, BLOCK_D] over keys first_key .. end_key - 1 of one sequence and KV head.

    query_index [BLOCK_M]: key index of each query's own token. With TREE, query_position and query_visible [BLOCK_M] are the queries'
    positions and masks, tree_start the key index of the first node, and node_position_ptr + j the position of node j; else position is
    index and the others are not read. With PATH, keys are counted by position and query_visible is one mask for all rows: from tree_start
    on, the path's nodes. first_key must be a multiple of BLOCK_N, so that a row meets the same tiles whatever its neighbours.
    Returns a part, all float32.
    """
    dim = tl.arange(0, BLOCK_D)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(first_key, end_key, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = key < end_key
        if HEAD_DIM == BLOCK_D:
            load_mask = inside[:, None]
        else:
            load_mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
        stored = key
        if PATH:  # noqa: SIM102 (a constant, unlike the inner one)
            if start + BLOCK_N > tree_start:
                stored = tl.where(key >= tree_start, tree_start + _on_path(key - tree_start, query_visible), key)
        block = tl.load(table_ptr + stored // CACHE_BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = block * cache_block_stride + (stored % CACHE_BLOCK_SIZE) * cache_slot_stride
        at = slot[:, None] + dim[None, :]
        k = widen(tl.load(k_ptr + at, mask=load_mask, other=0), CACHE, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP > 0:  # tanh by one exponential; the scores are in base 2, the cap is not: 1.4427 is log2(e)
            scores = SOFTCAP * 1.4426950408889634 * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 / SOFTCAP))))
        visible = inside[None, :] & (key[None, :] <= query_index[:, None])
        key_position = key
        if TREE:
            node = tl.maximum(key - tree_start, 0)
            is_node = inside & (key >= tree_start)
            on_path = ((query_visible[:, None] >> node[None, :].to(tl.int64)) & 1) != 0
            visible = visible & (on_path | (key < tree_start)[None, :])
            if WINDOW > 0:
                key_position = tl.where(is_node, tl.load(node_position_ptr + node, mask=is_node, other=0).to(tl.int32), key)
        if WINDOW > 0:
            visible = visible & (key_position[None, :] > query_position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen no key yet: avoid inf - inf
        weights = tl.exp2(scores - anchor[:, None])
        decay = tl.exp2(peak - anchor)
        total = total * decay + tl.sum(weights, axis=1)
        v = widen(tl.load(v_ptr + at, mask=load_mask, other=0), CACHE, q.dtype)
        acc = acc * decay[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        peak = new_peak
    return acc, total, peak


@triton.jit
def attend_chunks(
    q,
    query_index,
    query_position,
    query_visible,
    tree_start,
    node_position_ptr,
    first_key,
    end_key,
    table_ptr,
    k_ptr,
    v_ptr,
    cache_block_stride,
    cache_slot_stride,
    scale,
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
    CHUNK: tl.constexpr,
):
    """`attend` in parts of CHUNK keys, counted from key 0, merged in order; 0 for one part."""
    if CHUNK == 0:
        acc, total, peak = attend(
            q,
            query_index,
            query_position,
            query_visible,
            tree_start,
            node_position_ptr,
            first_key,
            end_key,
            table_ptr,
            k_ptr,
            v_ptr,
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
        )
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        for chunk in range(first_key // CHUNK * CHUNK, end_key, CHUNK):
            part, part_total, part_peak = attend(
                q,
                query_index,
                query_position,
                query_visible,
                tree_start,
                node_position_ptr,
                tl.maximum(first_key, chunk),
                tl.minimum(end_key, chunk + CHUNK),
                table_ptr,
                k_ptr,
                v_ptr,
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
            )
            acc, total, peak = merge_parts(acc, total, peak, part, part_total, part_peak)
    return acc, total, peak
