"""KV caches of the kernel cases: their contents, their scales, and the edge shapes of the 8-bit ones."""

from typing import Any

import torch

from dspark.kernels.kv_cache import CODE_LIMITS, KVScales

CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
MIXED = [(1, 1), (7, 7), (1, 33), (5, 40), (1, 16)]
"""Prefill, decode and chunks of prefill side by side: (query tokens, context length) of each sequence."""

CACHE_SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "rope_store_kv": {
        "int8_one_token": {"num_tokens": 1, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "cache": "int8"},
        "int8_d80_partial": {"num_tokens": 9, "num_heads": 4, "num_kv_heads": 2, "head_dim": 80, "rotary_dim": 32, "cache": "int8"},
        "int8_d128_norm": {"num_tokens": 19, "num_heads": 8, "num_kv_heads": 1, "head_dim": 128, "qk_norm": True, "cache": "int8"},
        "fp8_d64": {"num_tokens": 19, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "cache": "fp8"},
        "fp8_d96_norm": {"num_tokens": 3, "num_heads": 3, "num_kv_heads": 3, "head_dim": 96, "qk_norm": True, "cache": "fp8"},
    },
    "copy_blocks": {
        "int8": {"num_pairs": 3, "num_kv_heads": 3, "head_dim": 80, "cache": "int8"},
        "fp8": {"num_pairs": 3, "num_kv_heads": 3, "head_dim": 64, "cache": "fp8"},
    },
    "paged_attention": {
        "int8_one_token": {"sequences": [(1, 1)], "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "cache": "int8"},
        "int8_decode": {"sequences": [(1, 5), (1, 16), (1, 70)], "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "cache": "int8"},
        "int8_decode_d80_mha": {"sequences": [(1, 3), (1, 40)], "num_heads": 2, "num_kv_heads": 2, "head_dim": 80, "cache": "int8"},
        "int8_mixed": {"sequences": MIXED, "num_heads": 8, "num_kv_heads": 2, "head_dim": 96, "cache": "int8"},
        "int8_softcap_window": {"sequences": [(1, 70), (9, 40)], "num_heads": 2, "num_kv_heads": 1, "head_dim": 256}
        | {"softcap": 50.0, "window": 20, "cache": "int8"},
        "fp8_decode": {"sequences": [(1, 5), (1, 16), (1, 70)], "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "cache": "fp8"},
        "fp8_mixed_block_32": {"sequences": MIXED, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "block_size": 32, "cache": "fp8"},
        "fp8_chunk_window": {"sequences": [(40, 150)], "num_heads": 2, "num_kv_heads": 2, "head_dim": 64, "window": 50, "cache": "fp8"},
    },
}
"""Op -> name of the case -> its shape."""


def draw_caches(
    generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, cache: str | None
) -> tuple[torch.Tensor, torch.Tensor, KVScales | None]:
    """Key and value cache of a shape [num_blocks, num_kv_heads, block_size, D]. cache: "int8" or "fp8" for 8-bit ones with scales."""
    if cache is None:
        k_cache, v_cache = (torch.randn(*shape, generator=generator).to(dtype) for _ in range(2))
        return k_cache, v_cache, None
    k_cache, v_cache = (draw_codes(generator, *shape, dtype=CACHE_DTYPES[cache]) for _ in range(2))
    return k_cache, v_cache, draw_scales(generator, cache, shape[1], shape[3])


def poisoned(cache: torch.Tensor, owned: torch.Tensor) -> torch.Tensor:
    """The cache with NaN (127 in int8, which has none) in the slots that are not owned: it must not reach an output."""
    if cache.itemsize == 1:
        return torch.where(owned, cache.view(torch.uint8), 0x7F).view(cache.dtype)
    return torch.where(owned, cache, torch.tensor(float("nan"), dtype=cache.dtype))


def draw_codes(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of every size that an 8-bit cache may hold, subnormals and both limits among them."""
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, generator=generator).to(dtype)
    bits = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    return torch.where(bits & 0x7F == 0x7F, bits - 1, bits).view(dtype)  # without the two NaN


def draw_scales(generator: torch.Generator, cache: str, num_kv_heads: int, head_dim: int) -> KVScales:
    """Scales with which a normal variable reaches and now and then exceeds the limit."""
    limit = CODE_LIMITS[CACHE_DTYPES[cache]]
    k, v = ((2 + torch.rand(num_kv_heads, head_dim, generator=generator)) / limit for _ in range(2))
    return KVScales(k, v)
