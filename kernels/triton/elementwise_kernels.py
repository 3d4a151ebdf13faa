"""Jitted norm, rope + KV store, activation, copies of blocks and slots. Loads and stores in the tensors' dtype, arithmetic in float32."""

import triton
import triton.language as tl

from dspark.kernels.triton.codes_kernels import encode


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, hidden, x_stride, out_stride, eps, BLOCK: tl.constexpr):
    """One program a row: out[t] = x[t] / rms(x[t]) * weight."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < hidden
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    tl.store(out_ptr + row * out_stride + cols, (x * inverse_rms * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, hidden, x_stride, residual_stride, out_stride, eps, BLOCK: tl.constexpr):
    """One program a row: residual[t] += x[t], in place; out[t] = rms_norm of the rounded sum."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < hidden
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    residual_at = residual_ptr + row * residual_stride + cols
    summed = (tl.load(residual_at, mask=mask, other=0.0).to(tl.float32) + x).to(residual_ptr.dtype.element_ty)
    tl.store(residual_at, summed, mask=mask)
    wide = summed.to(tl.float32)  # norm what the next layer will read, not the unrounded sum
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
    tl.store(out_ptr + row * out_stride + cols, (wide * inverse_rms * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def silu_and_mul_kernel(gate_up_ptr, out_ptr, intermediate, gate_up_stride, out_stride, BLOCK: tl.constexpr):
    """One program a row and a block of columns: out = silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < intermediate
    gate_at = gate_up_ptr + row * gate_up_stride + cols
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_at + intermediate, mask=mask, other=0.0).to(tl.float32)
    activated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * out_stride + cols, activated.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gelu_tanh_and_mul_kernel(gate_up_ptr, out_ptr, intermediate, gate_up_stride, out_stride, BLOCK: tl.constexpr):
    """One program a row and a block of columns: out = gelu(gate) * up, as x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x**3))."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < intermediate
    gate_at = gate_up_ptr + row * gate_up_stride + cols
    gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_at + intermediate, mask=mask, other=0.0).to(tl.float32)
    inner = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    activated = gate / (1.0 + tl.exp(-inner)) * up
    tl.store(out_ptr + row * out_stride + cols, activated.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rope_store_kv_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slot_ptr,
    qkv_stride,
    cos_stride,
    sin_stride,
    cache_block_stride,
    cache_head_stride,
    cache_slot_stride,
    num_heads,
    num_kv_heads,
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    CACHE_BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QK_NORM: tl.constexpr,
    CACHE: tl.constexpr,
):
    """One program a token and BLOCK_HEADS of its q, k and v heads, whole heads in registers.

    A rotated value needs its partner HALF dimensions away. It is loaded again (the line is in L1) instead of shuffled, which holds for
    any rotary width and for head_dim that is no power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_D)
    is_q = head < num_heads
    is_v = (head >= num_heads + num_kv_heads) & (head < num_heads + 2 * num_kv_heads)
    is_k = (head >= num_heads) & (head < num_heads + num_kv_heads)
    in_head = dim < HEAD_DIM
    mask = (is_q | is_k | is_v)[:, None] & in_head[None, :]
    rotated_dim = dim < 2 * HALF
    partner = tl.where(dim < HALF, dim + HALF, tl.where(rotated_dim, dim - HALF, dim))

    head_at = qkv_ptr + token * qkv_stride + head[:, None] * HEAD_DIM
    raw = tl.load(head_at + dim[None, :], mask=mask, other=0.0)
    x = raw.to(tl.float32)
    y = tl.load(head_at + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if QK_NORM:
        inverse_rms = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        x_weight = tl.where(
            is_q[:, None],
            tl.load(q_norm_ptr + dim, mask=in_head, other=0.0).to(tl.float32)[None, :],
            tl.load(k_norm_ptr + dim, mask=in_head, other=0.0).to(tl.float32)[None, :],
        )
        y_weight = tl.where(
            is_q[:, None],
            tl.load(q_norm_ptr + partner, mask=in_head, other=0.0).to(tl.float32)[None, :],
            tl.load(k_norm_ptr + partner, mask=in_head, other=0.0).to(tl.float32)[None, :],
        )
        # rounded between norm and rotation, as the reference (and the unfused model) does
        x = (x * inverse_rms * x_weight).to(qkv_ptr.dtype.element_ty).to(tl.float32)
        y = (y * inverse_rms * y_weight).to(qkv_ptr.dtype.element_ty).to(tl.float32)
    pair = tl.where(dim < HALF, dim, dim - HALF)
    cos = tl.load(cos_ptr + token * cos_stride + pair, mask=rotated_dim, other=1.0)[None, :]
    sin = tl.load(sin_ptr + token * sin_stride + pair, mask=rotated_dim, other=0.0)[None, :]
    signed = tl.where((dim < HALF)[None, :], -y, y)
    turned = tl.where(rotated_dim[None, :], x * cos + signed * sin, x).to(qkv_ptr.dtype.element_ty)

    q_at = q_out_ptr + (token * num_heads + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(q_at, turned, mask=mask & is_q[:, None])
    slot = tl.load(slot_ptr + token)
    stored = mask & (slot >= 0)
    cache_at = (slot // CACHE_BLOCK_SIZE) * cache_block_stride + (slot % CACHE_BLOCK_SIZE) * cache_slot_stride
    k_head, v_head = (head - num_heads)[:, None].to(tl.int64), (head - num_heads - num_kv_heads)[:, None].to(tl.int64)
    k_mask, v_mask = stored & is_k[:, None], stored & is_v[:, None]
    k, v = turned.to(tl.float32), raw.to(tl.float32)
    if CACHE != "number":
        k = k / tl.load(k_scale_ptr + k_head * HEAD_DIM + dim[None, :], mask=k_mask, other=1.0)
        v = v / tl.load(v_scale_ptr + v_head * HEAD_DIM + dim[None, :], mask=v_mask, other=1.0)
    k_at = k_cache_ptr + cache_at + k_head * cache_head_stride + dim[None, :]
    tl.store(k_at, encode(k, CACHE, k_cache_ptr.dtype.element_ty), mask=k_mask)
    v_at = v_cache_ptr + cache_at + v_head * cache_head_stride + dim[None, :]
    tl.store(v_at, encode(v, CACHE, v_cache_ptr.dtype.element_ty), mask=v_mask)


@triton.jit
def copy_blocks_kernel(k_cache_ptr, v_cache_ptr, source_ptr, target_ptr, block_elements, block_stride, BLOCK: tl.constexpr):
    """One program a (source, target) pair and BLOCK elements of it, keys and values both."""
    pair = tl.program_id(0)
    source = tl.load(source_ptr + pair).to(tl.int64) * block_stride
    target = tl.load(target_ptr + pair).to(tl.int64) * block_stride
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < block_elements
    keys = tl.load(k_cache_ptr + source + offset, mask=mask)
    values = tl.load(v_cache_ptr + source + offset, mask=mask)
    tl.store(k_cache_ptr + target + offset, keys, mask=mask)
    tl.store(v_cache_ptr + target + offset, values, mask=mask)


@triton.jit
def copy_slots_kernel(
    k_cache_ptr,
    v_cache_ptr,
    source_ptr,
    target_ptr,
    num_pairs,
    cache_block_stride,
    cache_head_stride,
    cache_slot_stride,
    CACHE_BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (KV heads, pieces of the head): one program moves its piece of all pairs, and reads them all before it writes."""
    head = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    dim = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = pair < num_pairs
    mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    source = tl.load(source_ptr + pair, mask=inside, other=0)
    target = tl.load(target_ptr + pair, mask=inside, other=0)
    read = (source // CACHE_BLOCK_SIZE) * cache_block_stride + (source % CACHE_BLOCK_SIZE) * cache_slot_stride + head * cache_head_stride
    write = (target // CACHE_BLOCK_SIZE) * cache_block_stride + (target % CACHE_BLOCK_SIZE) * cache_slot_stride + head * cache_head_stride
    keys = tl.load(k_cache_ptr + read[:, None] + dim[None, :], mask=mask)
    values = tl.load(v_cache_ptr + read[:, None] + dim[None, :], mask=mask)
    tl.debug_barrier()
    tl.store(k_cache_ptr + write[:, None] + dim[None, :], keys, mask=mask)
    tl.store(v_cache_ptr + write[:, None] + dim[None, :], values, mask=mask)
