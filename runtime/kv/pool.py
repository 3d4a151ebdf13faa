"""The tensors behind the block ids."""

from __future__ import annotations

import torch

from dspark.kernels.cpu.pages import in_large_pages
from dspark.runtime.spec.model_config import ModelConfig


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * config.num_layers * config.num_kv_heads * block_size * config.head_dim * dtype.itemsize


def allocate_pool(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer a key and a value cache, see `allocate_layer`."""
    return [allocate_layer(config, num_blocks, block_size, dtype, device) for _ in range(config.num_layers)]


def allocate_layer(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's key and value cache [num_blocks, num_kv_heads, block_size, head_dim].

    Uninitialised on purpose: on CPU a page of memory counts only once a block in it is used.
    """
    shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
    keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    return (in_large_pages(keys), in_large_pages(values)) if device == "cpu" else (keys, values)
