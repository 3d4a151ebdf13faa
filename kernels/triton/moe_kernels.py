"""Jitted products of dense experts, and the sum of what a token's experts made."""

import triton
import triton.language as tl

from dspark.kernels.triton.gemm_kernels import rows_of, split_range, store_tile, tile_of


@triton.jit
def dense_kernel(
    x_ptr,
    row_scale_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    pairs_ptr,
    starts_ptr,
    num_rows,
    out_features,
    in_features,
    row_tiles,
    num_experts,
    top_k,
    x_stride,
    out_stride,
    weight_ptr,
    ROW_SCALES: tl.constexpr,
    COL_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_GROUP: tl.constexpr,
):
    """Grid (tiles, SPLITS). weight [E, N, K] of x's dtype, contiguous."""
    tile_m, tile_n = tile_of(tl.program_id(0), row_tiles, tl.cdiv(out_features, BLOCK_N), ROW_GROUP)
    expert, source, target, row_mask = rows_of(tile_m, num_rows, pairs_ptr, starts_ptr, num_experts, top_k, ROWS, EXPERTS, BLOCK_M)
    if ROWS != 0:
        if expert >= num_experts:
            return
        weight_ptr += expert.to(tl.int64) * out_features * in_features
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < out_features
    inner = tl.arange(0, BLOCK_K)
    x_at = x_ptr + source[:, None] * x_stride + inner[None, :]
    weight_at = weight_ptr + cols.to(tl.int64)[:, None] * in_features + inner[None, :]
    begin, end = split_range(in_features, BLOCK_K, SPLITS)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(begin, end, BLOCK_K):
        inside = (k + inner < in_features)[None, :]
        x = tl.load(x_at + k, mask=row_mask[:, None] & inside, other=0.0)
        weight = tl.load(weight_at + k, mask=col_mask[:, None] & inside, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    store_tile(
        acc, source, target, cols, row_mask, col_mask, row_scale_ptr, scale_ptr, bias_ptr, out_ptr, num_rows, out_features, out_stride,
        ROW_SCALES, COL_SCALES, HAS_BIAS, SPLITS,
    )  # fmt: skip


@triton.jit
def combine_kernel(results_ptr, shares_ptr, out_ptr, width, top_k, shares_stride, BLOCK: tl.constexpr):
    """Grid (tokens, blocks of columns): out[t] = sum over the token's choices of share * results[t * top_k + choice], in their order.

    Products and sums must not be fused (enable_fp_fusion=False), as the reference does not.
    """
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(top_k):
        share = tl.load(shares_ptr + token * shares_stride + choice)
        result = tl.load(results_ptr + (token * top_k + choice) * width + cols, mask=mask, other=0.0).to(tl.float32)
        total += result * share
    tl.store(out_ptr + token * width + cols, total.to(out_ptr.dtype.element_ty), mask=mask)
