"""Jitted GEMM of 16-bit (or float32) activations with 4 and 8 bit weights in the canonical layout of `kernels.packing`."""

import triton
import triton.language as tl


@triton.jit
def wna16_kernel(
    x_ptr,
    qweight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    out_features,
    in_features,
    packed_rows,
    group_size,
    x_stride,
    qweight_stride,
    scales_stride,
    zeros_stride,
    out_stride,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_GROUP: tl.constexpr,
):
    """One program a [BLOCK_M, BLOCK_N] tile of out = x @ weight + bias; BLOCK_K divides the group, so one scale row serves a step.

    A word holds 32 / BITS consecutive inputs of one output: a tile of words loads whole lines along N, is shifted once per lane and
    reshaped to [BLOCK_K, BLOCK_N]. Dequantised in float32 and rounded once to x's dtype, as the reference does.
    """
    LANES: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = BLOCK_K // LANES
    MAX_CODE: tl.constexpr = (1 << BITS) - 1
    # row tiles of ROW_GROUP share a column of weights while it is in L2
    program = tl.program_id(0)
    num_m = tl.cdiv(num_tokens, BLOCK_M)
    num_n = tl.cdiv(out_features, BLOCK_N)
    per_group = ROW_GROUP * num_n
    first_m = program // per_group * ROW_GROUP
    rows_here = tl.minimum(num_m - first_m, ROW_GROUP)
    tile_m = first_m + program % per_group % rows_here
    tile_n = program % per_group // rows_here

    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = row < num_tokens
    col_mask = col < out_features
    word = tl.arange(0, WORDS)
    lane_shift = tl.arange(0, LANES) * BITS
    inner = tl.arange(0, BLOCK_K)
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride + inner[None, :]
    words_at = qweight_ptr + word.to(tl.int64)[:, None] * qweight_stride + col[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, in_features, BLOCK_K):
        x = tl.load(x_at + k, mask=row_mask[:, None] & (k + inner < in_features)[None, :], other=0.0)
        first_word = k // LANES
        word_mask = (first_word + word < packed_rows)[:, None] & col_mask[None, :]
        words = tl.load(words_at + first_word.to(tl.int64) * qweight_stride, mask=word_mask, other=0)
        codes = (words[:, None, :] >> lane_shift[None, :, None]) & MAX_CODE
        codes = tl.reshape(codes, [BLOCK_K, BLOCK_N])
        group = (k // group_size).to(tl.int64)
        scale = tl.load(scales_ptr + group * scales_stride + col, mask=col_mask, other=0.0).to(tl.float32)
        if HAS_ZEROS:
            zero = tl.load(zeros_ptr + group * zeros_stride + col, mask=col_mask, other=0).to(tl.float32)
            weight = (codes.to(tl.float32) - zero[None, :]) * scale[None, :]
        else:
            weight = (codes - (1 << (BITS - 1))).to(tl.float32) * scale[None, :]
        acc += tl.dot(x, weight.to(x.dtype), input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + col, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + row.to(tl.int64)[:, None] * out_stride + col[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])
