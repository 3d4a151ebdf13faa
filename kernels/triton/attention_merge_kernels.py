"""Jitted code for the results of attention over parts of a context: how two are merged, how one is written, and the kernel that merges
what several programs wrote.

A part is (acc [rows, BLOCK_D]: values weighted with 2 ** (score - peak), total [rows]: sum of those weights, peak [rows]: largest score
in base 2); a row that saw no key has acc 0, total 0 and peak -inf. The additions are spelled as fused ones, so that a merge inside one
program and a merge by `merge_kernel` give the same bits.
"""

import triton
import triton.language as tl

from dspark.kernels.triton.codes_kernels import unit


@triton.jit
def first_key_of(first_position, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where a tile of queries from `first_position` on begins to read: a multiple of BLOCK_N, so that a row meets the same key tiles
    whatever its neighbours."""
    first_key = first_position * 0
    if WINDOW > 0:
        first_key = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    return first_key


@triton.jit
def merge_parts(acc, total, peak, next_acc, next_total, next_peak):
    """One part for both. A part without keys changes no bit of the other."""
    new_peak = tl.maximum(peak, next_peak)
    anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # neither saw a key: avoid inf - inf
    decay, next_decay = tl.exp2(peak - anchor), tl.exp2(next_peak - anchor)
    total = tl.fma(total, decay, next_total * next_decay)
    decay, next_decay = tl.broadcast_to(decay[:, None], acc.shape), tl.broadcast_to(next_decay[:, None], acc.shape)
    return tl.fma(acc, decay, next_acc * next_decay), total, new_peak


@triton.jit
def times_scale(rows, scale_ptr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CACHE: tl.constexpr):
    """rows [BLOCK_M, BLOCK_D] times the scales [HEAD_DIM] of an 8-bit cache, in the rows' dtype."""
    if CACHE != "number":
        dim = tl.arange(0, BLOCK_D)
        scale = tl.load(scale_ptr + dim, mask=dim < HEAD_DIM, other=0.0) * unit(CACHE)
        rows = (rows.to(tl.float32) * scale[None, :]).to(rows.dtype)
    return rows


@triton.jit
def store_rows(
    acc,
    total,
    peak,
    out_ptr,
    stats_ptr,
    v_scale_ptr,
    row_at,
    row_mask,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CACHE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Write rows to out [row, HEAD_DIM]; with SPLIT as parts: acc to out (float32), total and peak to stats [row, 2].

    row_at int64 [rows]: row numbers.
    """
    dim = tl.arange(0, BLOCK_D)
    at = out_ptr + row_at[:, None] * HEAD_DIM + dim[None, :]
    mask = row_mask[:, None] & (dim < HEAD_DIM)[None, :]
    if SPLIT:
        tl.store(at, acc, mask=mask)
        tl.store(stats_ptr + row_at * 2, total, mask=row_mask)
        tl.store(stats_ptr + row_at * 2 + 1, peak, mask=row_mask)
    else:
        out = times_scale(acc / tl.where(total == 0.0, 1.0, total)[:, None], v_scale_ptr, HEAD_DIM, BLOCK_D, CACHE)
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def merge_kernel(
    partial_ptr,
    stats_ptr,
    v_scale_ptr,
    out_ptr,
    query_start_ptr,
    context_len_ptr,
    tree_start_ptr,
    split_keys,
    split_rows,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CACHE: tl.constexpr,
    TREE: tl.constexpr,
):
    """Grid (queries of the longest sequence, heads, sequences): merge the parts of one row, in the order of their keys.

    partial float32 [splits, tokens * heads, HEAD_DIM] and stats [splits, tokens * heads, 2] as `store_rows` wrote them; split_rows:
    tokens * heads. Which splits were written follows from the tile of QUERIES that the row was computed in, as it did there.
    """
    query = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2)
    start = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - start
    if query < num_queries:
        context_len = tl.load(context_len_ptr + sequence)
        first_index = context_len - num_queries + query // QUERIES * QUERIES
        end_key = tl.minimum(first_index + QUERIES, context_len)
        first_position = first_index
        if TREE:
            first_position = tl.minimum(first_index, tl.load(tree_start_ptr + sequence))
        base = first_key_of(first_position, WINDOW, BLOCK_N) // split_keys * split_keys
        row_at = (start + query).to(tl.int64) * tl.num_programs(1) + head + tl.zeros([1], tl.int64)
        dim = tl.arange(0, BLOCK_D)
        acc = tl.zeros([1, BLOCK_D], tl.float32)
        total = tl.zeros([1], tl.float32)
        peak = tl.full([1], float("-inf"), tl.float32)
        for _split in range(base, end_key, split_keys):
            at = row_at + (_split - base) // split_keys * split_rows.to(tl.int64)
            part = tl.load(partial_ptr + at[:, None] * HEAD_DIM + dim[None, :], mask=(dim < HEAD_DIM)[None, :], other=0.0)
            acc, total, peak = merge_parts(acc, total, peak, part, tl.load(stats_ptr + at * 2), tl.load(stats_ptr + at * 2 + 1))
        scale_ptr = v_scale_ptr + head // GROUP * HEAD_DIM
        store_rows(acc, total, peak, out_ptr, stats_ptr, scale_ptr, row_at, total == total, HEAD_DIM, BLOCK_D, CACHE, False)
