"""What the matrix products share: which tile a program computes, which rows it has, and the sum of what splits of K leave.

ROWS says whose rows a product has. 0: x as it stands. Else those of a mixture of experts, sorted by expert: `pairs` names for each sorted
row its pair token * top_k + choice, `starts` [E + 1] where each expert's rows begin. 1 takes row pair // top_k of x and writes sorted rows,
2 takes sorted rows and writes row pair of the output.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(program, num_m, num_n, ROW_GROUP: tl.constexpr):
    """(row tile, column tile) of a program: ROW_GROUP row tiles share a column of weights while it is in L2."""
    per_group = ROW_GROUP * num_n
    first_m = program // per_group * ROW_GROUP
    rows_here = tl.minimum(num_m - first_m, ROW_GROUP)
    return first_m + program % per_group % rows_here, program % per_group // rows_here


@triton.jit
def expert_of(tile_m, starts_ptr, num_experts, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """(expert, first and end of its sorted rows of this tile); every expert begins a tile of its own. num_experts past the last tile.

    Counted on the device: how many rows each expert has is not known when the grid is chosen. EXPERTS: num_experts, a power of two up.
    """
    index = tl.arange(0, EXPERTS)
    begin = tl.load(starts_ptr + index, mask=index < num_experts, other=0)
    end = tl.load(starts_ptr + index + 1, mask=index < num_experts, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(tiles, 0)
    expert = tl.minimum(tl.sum((upto <= tile_m).to(tl.int32), 0), num_experts)
    before = tl.sum(tl.where(index == expert, upto - tiles, 0), 0)
    inside = expert < num_experts
    first = tl.load(starts_ptr + expert, mask=inside, other=0) + (tile_m - before) * BLOCK_M
    return expert, first, tl.load(starts_ptr + expert + 1, mask=inside, other=0)


@triton.jit
def rows_of(
    tile_m, num_rows, pairs_ptr, starts_ptr, num_experts, top_k, ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """(expert, rows of x, rows of the output, which of them there are) of a row tile."""
    if ROWS == 0:
        expert = 0
        source = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        target = source
        mask = source < num_rows
    else:
        expert, first, end = expert_of(tile_m, starts_ptr, num_experts, BLOCK_M, EXPERTS)
        position = first + tl.arange(0, BLOCK_M)
        mask = position < end
        pair = tl.load(pairs_ptr + position, mask=mask, other=0)
        source = position
        target = position
        if ROWS == 1:
            source = pair // top_k
        else:
            target = pair
    return expert, source.to(tl.int64), target.to(tl.int64), mask


@triton.jit
def split_range(in_features, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr):
    """The inputs that this program reduces: all of them, or its share of whole K steps (program axis 1)."""
    begin = 0
    end = in_features
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SPLITS) * BLOCK_K
        begin = tl.program_id(1) * share
        end = tl.minimum(begin + share, in_features)
    return begin, end


@triton.jit
def finished(
    acc,
    rows,
    cols,
    row_mask,
    col_mask,
    row_scale_ptr,
    scale_ptr,
    bias_ptr,
    ROW_SCALES: tl.constexpr,
    COL_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Sums [M, N] as results in float32: times the row's scale, times the output's, plus the bias, in this order."""
    y = acc.to(tl.float32)
    if ROW_SCALES:
        y = y * tl.load(row_scale_ptr + rows, mask=row_mask, other=0.0)[:, None]
    if COL_SCALES:
        y = y * tl.load(scale_ptr + cols, mask=col_mask, other=0.0)[None, :]
    if HAS_BIAS:
        y = y + tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def store_tile(
    acc,
    source,
    target,
    cols,
    row_mask,
    col_mask,
    row_scale_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    out_features,
    out_stride,
    ROW_SCALES: tl.constexpr,
    COL_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Write a tile: bare sums to [SPLITS, M, N] where there are splits, else `finished` results."""
    mask = row_mask[:, None] & col_mask[None, :]
    if SPLITS > 1:
        row = tl.program_id(1).to(tl.int64) * num_rows + target
        tl.store(out_ptr + row[:, None] * out_features + cols[None, :], acc, mask=mask)
    else:
        y = finished(acc, source, cols, row_mask, col_mask, row_scale_ptr, scale_ptr, bias_ptr, ROW_SCALES, COL_SCALES, HAS_BIAS)
        tl.store(out_ptr + target[:, None] * out_stride + cols[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_splits_kernel(
    sums_ptr,
    row_scale_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    out_features,
    out_stride,
    ROW_SCALES: tl.constexpr,
    COL_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (rows, blocks of columns): the sums [SPLITS, M, N] of a product, added in the order of the splits, then `finished`."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, col_mask = row < num_rows, cols < out_features
    mask = row_mask[:, None] & col_mask[None, :]
    acc = tl.load(sums_ptr + row[:, None] * out_features + cols[None, :], mask=mask, other=0)
    for split in tl.static_range(1, SPLITS):
        acc += tl.load(sums_ptr + (row + split * num_rows)[:, None] * out_features + cols[None, :], mask=mask, other=0)
    y = finished(acc, row, cols, row_mask, col_mask, row_scale_ptr, scale_ptr, bias_ptr, ROW_SCALES, COL_SCALES, HAS_BIAS)
    tl.store(out_ptr + row[:, None] * out_stride + cols[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)
