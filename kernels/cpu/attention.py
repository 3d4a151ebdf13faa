"""Paged attention that reads the pages in place, for float32, bfloat16, int8 and float8 caches.

On CPU a key block is stored dimension-major, [head_dim, block_size] inside the cache's [block_size, head_dim] room: 16 keys of one
dimension are one vector. `rope_store_kv` of this package writes them so; values keep the plain order.

Work is cut into (sequence, up to 16 queries, key/value head). The scores of a query row over its whole context lie in a scratch row, so the
softmax is one pass with no rescaling, and a row's arithmetic does not depend on which other rows are computed beside it, on the number of
threads or on how a prompt was cut into chunks.

A node of a draft tree has its path's scores moved together before the softmax and its weights moved apart after it. Then its arithmetic is
that of plain decoding after the same tokens, to the last bit: weights of 0 in between add nothing.
"""

from typing import Any

import numpy as np
import torch
from numba import get_num_threads, njit, prange

from dspark.kernels.batch import AttentionBatch
from dspark.kernels.cpu.attention_blocks import add_values, scores_16_keys, softmax
from dspark.kernels.cpu.llvm import address
from dspark.kernels.cpu.rows import empty_rows
from dspark.kernels.cpu.simd import exp_approx, store, widen
from dspark.kernels.cpu.views import CACHE_KINDS, KINDS, at, vector
from dspark.kernels.facts import KernelFacts
from dspark.kernels.kv_cache import KVScales

QUERY_TILE = 16
ROW_TILE = 4
SERIAL_SCORES = 8192
"""Up to so many scores (about 15 microseconds of work) attention runs on the calling thread."""
BLOCKS_AHEAD = 4
"""Key blocks asked for before they are read: the pages of a sequence lie anywhere in memory, so the machine cannot guess the next one."""
BYTES_KEPT = 1 << 15
"""Bytes of keys of the next task that are asked for while this one adds up its values."""


NO_NUMBERS = np.empty(0, np.float32)
NO_TREE = (np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int64))
"""`TreeMask.visible` and `start`, positions"""


def supports(op: str, facts: KernelFacts) -> str | None:
    if facts.dtype not in (torch.float32, torch.bfloat16):
        return f"is compiled for float32 and bfloat16, the dtype is {str(facts.dtype).removeprefix('torch.')}"
    if facts.head_dim % 16:
        return f"needs a head_dim that 16 divides, it is {facts.head_dim}"
    if facts.block_size % 16:
        return f"needs a block size that 16 divides, it is {facts.block_size}"
    return None


@njit(cache=True, nogil=True, error_model="numpy")
def _gather_path(nodes, visible):
    """Move the scores of the visible ones of a tree's nodes to the front, in order."""
    rank = 0
    for node in range(nodes.shape[0]):
        if (visible >> node) & 1:
            nodes[rank] = nodes[node]
            rank += 1


@njit(cache=True, nogil=True, error_model="numpy")
def _spread_path(nodes, visible):
    """The inverse for weights: those at the front back to the visible nodes, 0 to all others."""
    rank = 0
    for node in range(nodes.shape[0]):
        rank += (visible >> node) & 1
    for node in range(nodes.shape[0] - 1, -1, -1):
        if (visible >> node) & 1:
            rank -= 1
            nodes[node] = nodes[rank]
        else:
            nodes[node] = np.float32(0.0)


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def _cap(row, softcap):
    """s -> softcap * tanh(s / softcap) in place, for scores of any size."""
    twice = np.float32(2.0) / softcap
    for i in range(row.shape[0]):
        row[i] = softcap - np.float32(2.0) * softcap / (np.float32(1.0) + exp_approx(row[i] * twice))


@njit(cache=True, nogil=True, error_model="numpy")
def _load_queries(q, source, group, num_rows, q_width, head_dim, scale, key_scales, rows_q):
    """Widen and scale query rows: row = query * group + head in group, so that neighbours share their limits."""
    for row in range(num_rows):
        start = source + row // group * q_width + row % group * head_dim
        head = q[start : start + head_dim]
        target = rows_q[row * head_dim : (row + 1) * head_dim]
        for d in range(head_dim):
            target[d] = widen(head[d]) * scale
        if key_scales.shape[0]:
            for d in range(head_dim):
                target[d] *= key_scales[d]


@njit(cache=True, nogil=True, error_model="numpy")
def _store_rows(acc, tile, row0, group, value_scales, out, target, out_width, head_dim):
    """Write accumulated rows, scaled, where their queries' results belong."""
    for r in range(tile):
        row = row0 + r
        start = target + row // group * out_width + row % group * head_dim
        head = out[start : start + head_dim]
        values = acc[r * head_dim : (r + 1) * head_dim]
        if value_scales.shape[0]:
            for d in range(head_dim):
                values[d] *= value_scales[d]
        for d in range(head_dim):
            store(head, d, values[d])


@njit(cache=True, nogil=True, error_model="numpy")
def _key_blocks(task, query_start, context_lens, block_size, window):
    """First and one past the last of the key blocks (indices into the sequence's table) that a task reads first."""
    seq, first = np.int64(task[0]), np.int64(task[1])
    limit = np.int64(context_lens[seq]) - (np.int64(query_start[seq + 1]) - np.int64(query_start[seq])) + first + 1
    return max(limit - window, 0) // block_size if window > 0 else 0, -(-limit // block_size)


@njit(cache=True, nogil=True, error_model="numpy")
def _attend_tasks(
    worker,
    num_workers,
    q,
    q_width,
    k_flat,
    v_flat,
    tables,
    tasks,
    query_start,
    context_lens,
    shape,
    scale,
    window,
    softcap,
    scratch_len,
    k_scales,
    v_scales,
    tree,
    out,
):
    """One worker's share: every num_workers-th of the tasks int32 [n, 3] (sequence, first query of the tile, key/value head).

    shape: num_heads, num_kv_heads, block_size, head_dim. window 0 is full attention, softcap 0 is none. q rows are q_width elements apart.
    k_scales, v_scales: of an 8-bit cache, float32 [num_kv_heads * head_dim], else empty. tree: as NO_TREE, empty arrays without one.
    """
    visible, tree_start, positions = tree
    num_heads, num_kv_heads, block_size, head_dim = shape
    group = num_heads // num_kv_heads
    block_elements = block_size * head_dim
    page = num_kv_heads * block_elements
    out_width = num_heads * head_dim
    scores = np.empty(ROW_TILE * scratch_len, np.float32)
    rows_q = np.empty(QUERY_TILE * group * head_dim, np.float32)
    acc = np.empty(ROW_TILE * head_dim, np.float32)
    keys_at, values_at, item = address(k_flat), address(v_flat), k_flat.itemsize
    blocks_kept = max(BYTES_KEPT // (block_elements * item), BLOCKS_AHEAD)
    asked = 0  # one past the last key block of the present task that memory was asked for during the one before
    for t in range(worker, tasks.shape[0], num_workers):
        seq, first, kv_head = np.int64(tasks[t, 0]), np.int64(tasks[t, 1]), np.int64(tasks[t, 2])
        start, context = np.int64(query_start[seq]), np.int64(context_lens[seq])
        num_queries = np.int64(query_start[seq + 1]) - start
        num_rows = (min(first + QUERY_TILE, num_queries) - first) * group
        column, head_at = kv_head * group * head_dim, kv_head * block_elements
        blocks = tables[seq]
        channels = slice(kv_head * head_dim, (kv_head + 1) * head_dim)
        _load_queries(q, (start + first) * q_width + column, group, num_rows, q_width, head_dim, scale, k_scales[channels], rows_q)
        first_limit = context - num_queries + first + 1  # keys that the first query sees
        nodes_at = np.int64(tree_start[seq]) if tree_start.shape[0] else context  # key index of the first node of a draft tree
        for row0 in range(0, num_rows, ROW_TILE):
            tile = min(ROW_TILE, num_rows - row0)
            # the tile's last query sees most, its first query's window begins first
            high = first_limit + (row0 + tile - 1) // group
            first_seen = min(first_limit + row0 // group, nodes_at + 1)  # a tree's first level has the earliest window of its nodes
            first_block = max(first_seen - window, 0) // block_size if window > 0 else 0
            low = first_block * block_size
            for here in range(first_block, -(-high // block_size)):
                offset = np.int64(blocks[here]) * page + head_at
                ahead, coming = offset, here + BLOCKS_AHEAD
                if coming >= asked and coming * block_size < high:
                    ahead = np.int64(blocks[coming]) * page + head_at
                target = here * block_size - low
                for inside in range(0, min(block_size, high - here * block_size), 16):
                    skipped = inside * head_dim
                    scores_16_keys(
                        tile, rows_q, row0 * head_dim, head_dim, k_flat, offset + inside, block_size, head_dim,
                        scores, target + inside, scratch_len, keys_at + (ahead + skipped) * item, values_at + (offset + skipped) * item,
                    )  # fmt: skip
            for r in range(tile):
                limit = first_limit + (row0 + r) // group
                row = scores[r * scratch_len : r * scratch_len + high - low]
                is_node = limit > nodes_at
                if is_node:
                    token = start + first + (row0 + r) // group
                    _gather_path(row[nodes_at - low :], visible[token])
                    limit = positions[token] + 1
                begin = max(limit - window, 0) if window > 0 else 0
                if softcap > 0:
                    _cap(row[begin - low : limit - low], softcap)
                softmax(scores, r * scratch_len, high - low, begin - low, limit - low)
                if is_node:
                    _spread_path(row[nodes_at - low :], visible[token])
            acc[:] = np.float32(0.0)
            following, coming, last = tasks[t], 0, 0
            if row0 + ROW_TILE >= num_rows and t + num_workers < tasks.shape[0]:  # the first keys of the worker's next task
                following = tasks[t + num_workers]
                coming, last = _key_blocks(following, query_start, context_lens, block_size, window)
                last = min(last, coming + blocks_kept)
            next_blocks, next_head = tables[following[0]], np.int64(following[2]) * block_elements
            for here in range(first_block, -(-high // block_size)):
                offset, target = np.int64(blocks[here]) * page + head_at, here * block_size - low
                num_keys = min(block_size, high - here * block_size)
                ahead = values_at + offset * item
                if coming < last and num_keys == block_size:
                    ahead = keys_at + (np.int64(next_blocks[coming]) * page + next_head) * item
                    coming += 1
                add_values(tile, scores, target, scratch_len, v_flat, offset, head_dim, num_keys, head_dim, acc, 0, head_dim, ahead)
            asked = coming
            _store_rows(acc, tile, row0, group, v_scales[channels], out, (start + first) * out_width + column, out_width, head_dim)


@njit(parallel=True, cache=True, nogil=True, error_model="numpy")
def _attend_parallel(
    num_workers, kind, cache_kind, q_at, k_at, v_at, out_at, q_width, q_size, cache_size, out_size,
    tables, tasks, query_start, context_lens, tree,
    shape, scale, window, softcap, scratch_len, k_scales, v_scales,
):  # fmt: skip
    """Every task. q, caches and out by address (see `views.vector`)."""
    q, out = vector(kind, q_at, q_size), vector(kind, out_at, out_size)
    k_flat, v_flat = vector(cache_kind, k_at, cache_size), vector(cache_kind, v_at, cache_size)
    for worker in prange(num_workers):
        _attend_tasks(
            worker, num_workers, q, q_width, k_flat, v_flat, tables, tasks, query_start, context_lens,
            shape, scale, window, softcap, scratch_len, k_scales, v_scales, tree, out,
        )  # fmt: skip


@njit(cache=True, nogil=True, error_model="numpy")
def _attend_serial(
    num_workers, kind, cache_kind, q_at, k_at, v_at, out_at, q_width, q_size, cache_size, out_size,
    tables, tasks, query_start, context_lens, tree,
    shape, scale, window, softcap, scratch_len, k_scales, v_scales,
):  # fmt: skip
    """The same on the calling thread."""
    q, out = vector(kind, q_at, q_size), vector(kind, out_at, out_size)
    k_flat, v_flat = vector(cache_kind, k_at, cache_size), vector(cache_kind, v_at, cache_size)
    for worker in range(num_workers):
        _attend_tasks(
            worker, num_workers, q, q_width, k_flat, v_flat, tables, tasks, query_start, context_lens,
            shape, scale, window, softcap, scratch_len, k_scales, v_scales, tree, out,
        )  # fmt: skip


@njit(cache=True, nogil=True, error_model="numpy")
def _cut_tasks(query_start, context_lens, num_kv_heads):
    """(sequence, first query, head) of every tile, heavy ones first so that threads end together."""
    num_tiles = 0
    for seq in range(context_lens.shape[0]):
        num_tiles += -(-(query_start[seq + 1] - query_start[seq]) // QUERY_TILE)
    tasks = np.empty((num_tiles * num_kv_heads, 3), np.int32)
    cost = np.empty(num_tiles * num_kv_heads, np.int64)
    t = 0
    for seq in range(context_lens.shape[0]):
        num_queries = query_start[seq + 1] - query_start[seq]
        for first in range(0, num_queries, QUERY_TILE):
            for head in range(num_kv_heads):
                tasks[t, 0], tasks[t, 1], tasks[t, 2] = seq, first, head
                cost[t] = -np.int64(context_lens[seq]) * min(QUERY_TILE, num_queries - first)
                t += 1
    return tasks[np.argsort(cost, kind="mergesort")]


def flat_scales(kv_scales: KVScales | None) -> tuple[np.ndarray, np.ndarray]:
    """Scales of keys and of values as compiled loops take them, empty for a cache without."""
    return (NO_NUMBERS, NO_NUMBERS) if kv_scales is None else (kv_scales.k.view(-1).numpy(), kv_scales.v.view(-1).numpy())


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
    """See `kernels.reference.attention`; the keys are dimension-major (module docstring)."""
    num_tokens, num_heads, head_dim = q.shape
    out = empty_rows(num_tokens, num_heads * head_dim, q.dtype)
    if num_tokens == 0:
        return out
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    if q.stride(1) != head_dim or q.stride(2) != 1:
        raise ValueError(f"needs heads side by side, strides are {q.stride()}")
    q_width = q.stride(0)
    kinds = KINDS[q.dtype], CACHE_KINDS[k_cache.dtype]
    places = q.data_ptr(), at(k_cache), at(v_cache), out.data_ptr()
    sizes = q_width, q_width * (num_tokens - 1) + num_heads * head_dim, k_cache.numel(), num_tokens * num_heads * head_dim
    step = batch.prepared.get(num_kv_heads)
    if step is None:
        step = batch.prepared[num_kv_heads] = _prepare(batch, num_kv_heads)
    scratch_len = -(-batch.max_context_len // block_size) * block_size + 16
    shape = (num_heads, num_kv_heads, block_size, head_dim)
    small = num_tokens * batch.max_context_len * num_heads <= SERIAL_SCORES
    (_attend_serial if small else _attend_parallel)(
        1 if small else get_num_threads(), *kinds, *places, *sizes, *step,
        shape, np.float32(scale), window or 0, np.float32(softcap), scratch_len, *flat_scales(kv_scales),
    )  # fmt: skip
    return out


def _prepare(batch: AttentionBatch, num_kv_heads: int) -> tuple[Any, ...]:
    """What all layers of a step share: tables, tasks, query_start, context_lens and tree, see `_attend_tasks`."""
    query_start, context_lens = batch.query_start.numpy(), batch.context_lens.numpy()
    tree = NO_TREE if batch.tree is None else (batch.tree.visible.numpy(), batch.tree.start.numpy(), batch.positions.numpy())
    return batch.block_tables.numpy(), _cut_tasks(query_start, context_lens, num_kv_heads), query_start, context_lens, tree
