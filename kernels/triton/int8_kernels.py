"""Jitted GEMM of 8-bit integers on both sides: exact sums in int32 on the tensor cores, scaled where they are done."""

import triton
import triton.language as tl

from dspark.kernels.triton.gemm_kernels import rows_of, split_range, store_tile, tile_of


@triton.jit
def int8_kernel(
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
    """Grid (tiles, SPLITS). x int8 with a float32 scale a row; weight int8 [E, N, K] and scales float32 [E, N], contiguous.

    Sums of integers do not depend on their order: neither on SPLITS nor on the tile. What follows must not be fused
    (enable_fp_fusion=False): then the result is the reference's to the last bit.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), row_tiles, tl.cdiv(out_features, BLOCK_N), ROW_GROUP)
    expert, source, target, row_mask = rows_of(tile_m, num_rows, pairs_ptr, starts_ptr, num_experts, top_k, ROWS, EXPERTS, BLOCK_M)
    if ROWS != 0:
        if expert >= num_experts:
            return
        weight_ptr += expert.to(tl.int64) * out_features * in_features
        scale_ptr += expert * out_features
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < out_features
    inner = tl.arange(0, BLOCK_K)
    x_at = x_ptr + source[:, None] * x_stride + inner[None, :]
    weight_at = weight_ptr + cols.to(tl.int64)[:, None] * in_features + inner[None, :]
    begin, end = split_range(in_features, BLOCK_K, SPLITS)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for k in range(begin, end, BLOCK_K):
        inside = (k + inner < in_features)[None, :]
        x = tl.load(x_at + k, mask=row_mask[:, None] & inside, other=0)
        weight = tl.load(weight_at + k, mask=col_mask[:, None] & inside, other=0)
        acc = tl.dot(x, tl.trans(weight), acc, out_dtype=tl.int32)
    store_tile(
        acc, source, target, cols, row_mask, col_mask, row_scale_ptr, scale_ptr, bias_ptr, out_ptr, num_rows, out_features, out_stride,
        ROW_SCALES, COL_SCALES, HAS_BIAS, SPLITS,
    )  # fmt: skip
