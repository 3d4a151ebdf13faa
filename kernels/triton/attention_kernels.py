"""Jitted attention over the paged KV cache: one inner loop over key tiles, a decode and a prefill kernel around it.

Rows of a tile are query heads that share one KV head (GQA packed into the tile): row r is query token r // GROUP, head r % GROUP.
A key tile spans pages: each key's block id is gathered from the block table, so any page size works. Table entries and slots at or past
the last key are never read. Scores and softmax are float32 in base 2 (`scale` comes multiplied by log2(e)).

CACHE says what the pages hold: "number", or 8-bit "int8" or "fp8" with scales [KV heads, HEAD_DIM]. Those stand outside the loop: queries
are multiplied by the scales of the keys, results by those of the values; in the loop 8 bits are widened in registers.

TREE says that the step has draft trees (see `kernels.batch.TreeMask`); a node is one of several queries, so the decode kernel has none.
"""

import triton
import triton.language as tl

from dspark.kernels.triton.codes_kernels import unit, widen


@triton.jit
def _attend(
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
):
    """Online softmax of q [BLOCK_M, BLOCK_D] over keys first_key .. end_key - 1 of one sequence and KV head.

    query_index [BLOCK_M]: key index of each query's own token. With TREE, query_position and query_visible [BLOCK_M] are the queries'
    positions and masks, tree_start the key index of the first node, and node_position_ptr + j the position of node j; else position is
    index and the others are not read. first_key must be a multiple of BLOCK_N, so that a row meets the same tiles whatever its neighbours.
    Returns (unnormalised sum [BLOCK_M, BLOCK_D], softmax denominator [BLOCK_M], peak score [BLOCK_M]), all float32.
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
        block = tl.load(table_ptr + key // CACHE_BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = block * cache_block_stride + (key % CACHE_BLOCK_SIZE) * cache_slot_stride
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
def _times_scale(rows, scale_ptr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CACHE: tl.constexpr):
    """rows [BLOCK_M, BLOCK_D] times the scales [HEAD_DIM] of an 8-bit cache, in the rows' dtype."""
    if CACHE != "number":
        dim = tl.arange(0, BLOCK_D)
        scale = tl.load(scale_ptr + dim, mask=dim < HEAD_DIM, other=0.0) * unit(CACHE)
        rows = (rows.to(tl.float32) * scale[None, :]).to(rows.dtype)
    return rows


@triton.jit
def decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    query_start_ptr,
    context_len_ptr,
    table_ptr,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    table_stride,
    cache_block_stride,
    cache_head_stride,
    cache_slot_stride,
    scale,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CACHE_BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Grid (sequences, KV heads), at most one query token a sequence: its GROUP query heads are the rows of the tile."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    token = tl.load(query_start_ptr + sequence).to(tl.int64)
    has_query = tl.load(query_start_ptr + sequence + 1) > token
    context_len = tl.load(context_len_ptr + sequence)
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + row
    mask = ((row < GROUP) & has_query)[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + token * q_token_stride + head[:, None] * q_head_stride + dim[None, :], mask=mask, other=0.0)
    q = _times_scale(q, k_scale_ptr + kv_head * HEAD_DIM, HEAD_DIM, BLOCK_D, CACHE)
    position = context_len - 1 + tl.zeros([BLOCK_M], tl.int32)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(context_len - WINDOW, 0) // BLOCK_N * BLOCK_N
    acc, total, _peak = _attend(
        q,
        position,
        position,
        position,
        context_len,
        context_len_ptr,
        first_key,
        context_len,
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
    )
    out = _times_scale(acc / tl.where(total == 0.0, 1.0, total)[:, None], v_scale_ptr + kv_head * HEAD_DIM, HEAD_DIM, BLOCK_D, CACHE)
    out_at = out_ptr + token * out_token_stride + head[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    query_start_ptr,
    context_len_ptr,
    table_ptr,
    position_ptr,
    visible_ptr,
    tree_start_ptr,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    table_stride,
    cache_block_stride,
    cache_head_stride,
    cache_slot_stride,
    scale,
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
):
    """Grid (query tiles of the longest sequence, KV heads, sequences): BLOCK_M // GROUP query tokens of one sequence a program.

    Tiles past a sequence's own queries return at once. The last tiles, which see the most keys, start first.
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    start = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - start
    first_query = tile * QUERIES
    if first_query < num_queries:
        context_len = tl.load(context_len_ptr + sequence)
        row = tl.arange(0, BLOCK_M)
        dim = tl.arange(0, BLOCK_D)
        query = first_query + row // GROUP
        head = kv_head * GROUP + row % GROUP
        mask = ((row < QUERIES * GROUP) & (query < num_queries))[:, None] & (dim < HEAD_DIM)[None, :]
        token = (start + query).to(tl.int64)
        q_at = q_ptr + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :]
        q = tl.load(q_at, mask=mask, other=0.0)
        q = _times_scale(q, k_scale_ptr + kv_head * HEAD_DIM, HEAD_DIM, BLOCK_D, CACHE)
        first_index = context_len - num_queries + first_query
        index = first_index + row // GROUP
        end_key = tl.minimum(first_index + QUERIES, context_len)
        position, visible, tree_start, node_position_ptr = index, index, context_len, position_ptr
        first_position = first_index
        if TREE:
            is_query = query < num_queries
            position = tl.load(position_ptr + token, mask=is_query, other=0).to(tl.int32)
            visible = tl.load(visible_ptr + token, mask=is_query, other=0)
            tree_start = tl.load(tree_start_ptr + sequence)
            node_position_ptr = position_ptr + start + num_queries - (context_len - tree_start)
            first_position = tl.minimum(first_index, tree_start)  # where the first nodes stand
        first_key = 0
        if WINDOW > 0:
            first_key = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        acc, total, _peak = _attend(
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
        )
        out = _times_scale(acc / tl.where(total == 0.0, 1.0, total)[:, None], v_scale_ptr + kv_head * HEAD_DIM, HEAD_DIM, BLOCK_D, CACHE)
        out_at = out_ptr + token[:, None] * out_token_stride + head[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)
