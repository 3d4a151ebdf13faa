"""Scales of an 8-bit KV cache that a source brings along: an engine that was calibrated, or a checkpoint with a kv_cache_scheme."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dspark.converters.mapping import MappedModel
from dspark.runtime.spec.kv_cache import KVCacheConfig, scale_names

if TYPE_CHECKING:
    import torch


@runtime_checkable
class CacheScaleSource(Protocol):
    """What a reader with such scales offers beyond `CheckpointReader`."""

    def kv_cache(self) -> KVCacheConfig | None:
        """What they are for, None without any."""

    def kv_scale(self, name: str) -> torch.Tensor:
        """One of them by the engine's name, float32 [num_kv_heads, head_dim]."""


@dataclass(frozen=True)
class CarriedScales:
    """The scales that an engine takes over from its source. config: None when there are none. notes: what the user should know."""

    config: KVCacheConfig | None
    names: tuple[str, ...]
    notes: tuple[str, ...]
    reader: Any

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of each."""
        for name in self.names:
            yield name, self.reader.kv_scale(name)


def carried_scales(model: MappedModel, calibrated: bool = False) -> CarriedScales:
    """What a conversion or quantization takes over, which is nothing when it is calibrated for a cache itself, and nothing past adapters,
    which change keys and values."""
    reader: Any = model.reader
    if calibrated:
        return CarriedScales(None, (), (), reader)
    config = _cache_of(reader)
    if config is not None:
        names = tuple(name for layer in range(model.config.num_layers) for name in scale_names(layer))
        return CarriedScales(config, names, (f"the scales of the KV cache are the source's: {config.describe()}",), reader)
    base = getattr(reader, "base", None)
    lost = () if _cache_of(base) is None else ("the KV cache keeps the model's dtype: the base was calibrated without the adapters",)
    return CarriedScales(None, (), lost, reader)


def _cache_of(reader: Any) -> KVCacheConfig | None:
    return reader.kv_cache() if isinstance(reader, CacheScaleSource) else None
