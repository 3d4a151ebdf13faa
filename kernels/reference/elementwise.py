"""Norms, rotary embedding, activation and KV store in plain torch: read these first, they say what every faster kernel must compute.

Shapes: T tokens, H hidden size, D head_dim. All arithmetic is float32; results are rounded once to the dtype of the input.
"""

import torch

from dspark.kernels.kv_cache import KVScales, to_codes


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] / rms(x) * weight [H]."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """residual' = residual + x (rounded to its dtype); returns (rms_norm(residual'), residual'). Both [T, H]."""
    summed = (residual.float() + x.float()).to(residual.dtype)
    return rms_norm(summed, weight, eps), summed


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * I], gate first -> silu(gate) * up [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * I], gate first -> gelu(gate) * up [T, I], gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotation of x [T, heads, D] by cos, sin float32 [T, R / 2]; dimensions from R on pass through."""
    half = cos.shape[-1]
    wide = x.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    return torch.cat([first * c - second * s, second * c + first * s, rest], -1).to(x.dtype)


def rope_store_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    kv_scales: KVScales | None = None,
) -> torch.Tensor:
    """Norm (when given) and rotate q and k, store k and v into the cache, return q [T, num_heads, D].

    qkv [T, (num_heads + 2 * num_kv_heads) * D]; caches [num_blocks, num_kv_heads, block_size, D]; slot_mapping int64 [T].
    A token whose slot is negative is stored nowhere. kv_scales: of an 8-bit cache, whose numbers are made from k and v rounded to the dtype
    of qkv.
    """
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    q, k, v = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, head_dim)).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    if kv_scales is not None:
        k, v = to_codes(k, kv_scales.k, k_cache.dtype), to_codes(v, kv_scales.v, v_cache.dtype)
    stored = slot_mapping >= 0
    block, offset = slot_mapping[stored] // block_size, slot_mapping[stored] % block_size
    k_cache[block, :, offset] = k[stored].to(k_cache.dtype)
    v_cache[block, :, offset] = v[stored].to(v_cache.dtype)
    return q


def read_kv(k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some slots as they are stored, [T, num_kv_heads, D] each; slot_mapping int64 [T]. For calibration and tests."""
    block_size = k_cache.shape[2]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    return k_cache[block, :, offset], v_cache[block, :, offset]


def copy_blocks(k_cache: torch.Tensor, v_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy whole KV blocks, source and target int64 [n] block ids (copy-on-write). Sources and targets do not overlap."""
    k_cache[target] = k_cache[source]
    v_cache[target] = v_cache[source]


def copy_slots(k_cache: torch.Tensor, v_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy keys and values of single tokens, source and target int64 [n] slots (block_id * block_size + offset).

    No target occurs twice, and none is the source of a later pair. It may be that of an earlier one: a path that moves towards its
    beginning. So the order of reads and writes does not matter but for these, which are read first.
    """
    block_size = k_cache.shape[2]
    blocks, offsets = target // block_size, target % block_size
    k, v = read_kv(k_cache, v_cache, source)
    k_cache[blocks, :, offsets] = k
    v_cache[blocks, :, offsets] = v
