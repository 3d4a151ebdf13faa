"""Jitted GEMM of float8 (e4m3fn) weights: with float8 inputs (capability 8.9 and above), or with 16-bit ones anywhere."""

import triton
import triton.language as tl

from dspark.kernels.triton.codes_kernels import widen
from dspark.kernels.triton.gemm_kernels import rows_of, split_range, store_tile, tile_of


@triton.jit
def fp8_kernel(
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
    block_scale_ptr,
    block_rows,
    block_cols,
    block_outputs,
    block_inputs,
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
    BLOCKS: tl.constexpr,
    WIDEN: tl.constexpr,
    SWAP: tl.constexpr,
):
    """Grid (tiles, SPLITS). weight float8 [E, N, K], contiguous. BLOCKS: block_scale float32 [E, block_rows, block_cols], one for each
    block_outputs x block_inputs; BLOCK_K divides block_inputs.

    WIDEN: the weight comes as bytes and is widened to x's dtype in units of `codes_kernels.unit`, which the scales make up for. Otherwise x
    is float8 too, and sums of BLOCK_K products go into a float32 sum: Hopper's own accumulator keeps fewer bits.

    SWAP: out.T = weight @ x.T. Hopper's float8 instruction has 64 rows: few tokens fill its columns instead, weights its rows.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), row_tiles, tl.cdiv(out_features, BLOCK_N), ROW_GROUP)
    expert, source, target, row_mask = rows_of(tile_m, num_rows, pairs_ptr, starts_ptr, num_experts, top_k, ROWS, EXPERTS, BLOCK_M)
    if ROWS != 0:
        if expert >= num_experts:
            return
        weight_ptr += expert.to(tl.int64) * out_features * in_features
        scale_ptr += expert * out_features
        block_scale_ptr += expert * block_rows * block_cols
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < out_features
    inner = tl.arange(0, BLOCK_K)
    x_at = x_ptr + source[:, None] * x_stride + inner[None, :]
    weight_at = weight_ptr + cols.to(tl.int64)[:, None] * in_features + inner[None, :]
    block_scale_at = block_scale_ptr + cols // block_outputs * block_cols
    begin, end = split_range(in_features, BLOCK_K, SPLITS)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) if SWAP else tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if BLOCKS:  # a step ahead, or every step would wait for its few scales
        scale = tl.load(block_scale_at + begin // block_inputs, mask=col_mask, other=0.0)
    for k in range(begin, end, BLOCK_K):
        inside = (k + inner < in_features)[None, :]
        if WIDEN:
            x = tl.load(x_at + k, mask=row_mask[:, None] & inside, other=0.0)
            codes = tl.load(weight_at + k, mask=col_mask[:, None] & inside, other=0)
            weight = widen(codes, "fp8", x.dtype)
        else:
            x = tl.load(x_at + k, mask=row_mask[:, None] & inside)
            weight = tl.load(weight_at + k, mask=col_mask[:, None] & inside)
        left, right = (weight, tl.trans(x)) if SWAP else (x, tl.trans(weight))
        if BLOCKS:
            step = scale
            scale = tl.load(block_scale_at + (k + BLOCK_K) // block_inputs, mask=col_mask & (k + BLOCK_K < end), other=0.0)
            acc += tl.dot(left, right, input_precision="ieee") * (step[:, None] if SWAP else step[None, :])
        else:
            acc = tl.dot(left, right, acc, input_precision="ieee", max_num_imprecise_acc=BLOCK_K)
    if SWAP:
        acc = tl.trans(acc)
    store_tile(
        acc, source, target, cols, row_mask, col_mask, row_scale_ptr, scale_ptr, bias_ptr, out_ptr, num_rows, out_features, out_stride,
        ROW_SCALES, COL_SCALES, HAS_BIAS, SPLITS,
    )  # fmt: skip
