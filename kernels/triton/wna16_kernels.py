"""Jitted GEMM of 16-bit (or float32) activations with 4 and 8 bit weights in the canonical layout of `kernels.packing`."""

import triton
import triton.language as tl

from dspark.kernels.triton.gemm_kernels import rows_of, split_range, store_tile, tile_of


@triton.jit
def wna16_kernel(
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
    qweight_ptr,
    group_scales_ptr,
    zeros_ptr,
    perm_ptr,
    packed_rows,
    num_groups,
    group_size,
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
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_PERM: tl.constexpr,
):
    """Grid (tiles, SPLITS). qweight int32 [E, packed_rows, N], scales and zeros [E, num_groups, N], contiguous; BLOCK_K divides the group,
    so one row of scales serves a step. perm int32 [K]: stored row j belongs to input perm[j].

    A word holds 32 / BITS consecutive inputs of one output: a tile of words loads whole lines along N, 16 bytes a thread, is shifted once
    per lane and reshaped to [BLOCK_K, BLOCK_N]. Dequantised in float32 and rounded once to x's dtype, as the reference does.
    """
    LANES: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = BLOCK_K // LANES
    MAX_CODE: tl.constexpr = (1 << BITS) - 1
    tile_m, tile_n = tile_of(tl.program_id(0), row_tiles, tl.cdiv(out_features, BLOCK_N), ROW_GROUP)
    expert, source, target, row_mask = rows_of(tile_m, num_rows, pairs_ptr, starts_ptr, num_experts, top_k, ROWS, EXPERTS, BLOCK_M)
    if ROWS != 0:
        if expert >= num_experts:
            return
        qweight_ptr += expert.to(tl.int64) * packed_rows * out_features
        group_scales_ptr += expert.to(tl.int64) * num_groups * out_features
        zeros_ptr += expert.to(tl.int64) * num_groups * out_features
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = col < out_features
    word = tl.arange(0, WORDS)
    lane_shift = tl.arange(0, LANES) * BITS
    inner = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + source[:, None] * x_stride
    words_at = qweight_ptr + word.to(tl.int64)[:, None] * out_features + col[None, :]
    begin, end = split_range(in_features, BLOCK_K, SPLITS)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # scales and zeros are too narrow for asynchronous copies: they are loaded a step ahead, or every step would wait for them
    scale_at, zero_at = group_scales_ptr + col, zeros_ptr + col
    first = (begin // group_size).to(tl.int64) * out_features if SPLITS > 1 else 0
    scale = tl.load(scale_at + first, mask=col_mask, other=0.0)
    if HAS_ZEROS:
        zero = tl.load(zero_at + first, mask=col_mask, other=0)
    for k in range(begin, end, BLOCK_K):
        inside = k + inner < in_features
        if HAS_PERM:
            x_at = x_rows + tl.load(perm_ptr + k + inner, mask=inside, other=0)[None, :]
        else:
            x_at = x_rows + (k + inner)[None, :]
        x = tl.load(x_at, mask=row_mask[:, None] & inside[None, :], other=0.0)
        first_word = k // LANES
        word_mask = (first_word + word < packed_rows)[:, None] & col_mask[None, :]
        words = tl.load(words_at + first_word.to(tl.int64) * out_features, mask=word_mask, other=0)
        codes = (words[:, None, :] >> lane_shift[None, :, None]) & MAX_CODE
        codes = tl.reshape(codes, [BLOCK_K, BLOCK_N])
        row = ((k + BLOCK_K) // group_size).to(tl.int64) * out_features
        ahead = col_mask & (k + BLOCK_K < end)
        step = scale.to(tl.float32)[None, :]
        scale = tl.load(scale_at + row, mask=ahead, other=0.0)
        if HAS_ZEROS:
            weight = (codes.to(tl.float32) - zero.to(tl.float32)[None, :]) * step
            zero = tl.load(zero_at + row, mask=ahead, other=0)
        else:
            weight = (codes - (1 << (BITS - 1))).to(tl.float32) * step
        acc += tl.dot(x, weight.to(x.dtype), input_precision="ieee")
    store_tile(
        acc, source, target, col, row_mask, col_mask, row_scale_ptr, scale_ptr, bias_ptr, out_ptr, num_rows, out_features, out_stride,
        ROW_SCALES, COL_SCALES, HAS_BIAS, SPLITS,
    )  # fmt: skip
