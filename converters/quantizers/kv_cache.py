"""Scales of an 8-bit KV cache, from the largest magnitudes that calibration saw in each channel.

Keys are observed after norm and rotation, as the cache holds them: a rotation mixes channels i and i + D/2, so each sees both. Outliers
of keys stay in their channels whatever the token (KIVI, arXiv:2402.02750), which is why a scale per channel is the default: it costs
nothing while attention runs (see `kernels.kv_cache`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.kv_cache import GRANULARITIES, QUANTIZED_CACHES, KVCacheConfig, scale_names

if TYPE_CHECKING:
    import torch

    from dspark.kernels.ops import Kernels

DEFAULT_GRANULARITY = "channel"
DEFAULT_MARGIN = 1.1
"""Room above the largest magnitude seen: other text exceeds it here and there, and a number past the end loses more than a wider step."""
COMMON_QUANTILE = 0.9
"""A channel's range is at least this quantile of its head's ranges: the largest tenth, where outliers are, have a range each, the others
nearly one in common. Text unlike the calibration's (or much more of it) moves the small ranges most. On SmolLM2-135M, 154 tokens of chat
and then Python's reference: a mean KL of 0.006 instead of 0.058; with 8192 tokens of the like, 0.0014 instead of 0.0010."""
SMALLEST_SHARE = 1 / 256
"""Of its head's largest range, where nearly all channels of a head were silent."""
FEW_TOKENS = 2048
"""Below so many, ranges are still far from those of other text."""


def kv_cache_config(
    dtype: str, granularity: str = DEFAULT_GRANULARITY, margin: float = DEFAULT_MARGIN, num_tokens: int = 0
) -> KVCacheConfig:
    """The record of a calibration. Raises ValueError for a dtype or a granularity that there is not, or a margin below 1."""
    if dtype not in QUANTIZED_CACHES or granularity not in GRANULARITIES or margin < 1:
        raise ValueError(f"no KV cache of {dtype} per {granularity} with margin {margin}")
    return KVCacheConfig(dtype, granularity, "absmax", margin, num_tokens)


def kv_scales(absmax: torch.Tensor, config: KVCacheConfig) -> torch.Tensor:
    """Largest magnitudes [num_kv_heads, D] -> scales float32 [num_kv_heads, D], the same along what shares one.

    int8 absmax / 127, fp8 absmax / 448, times the margin; a head that was never anything but zero is taken for one that reached 1.
    """
    import torch

    from dspark.kernels.kv_cache import FP8_LIMIT, INT8_LIMIT

    limit = INT8_LIMIT if config.dtype == "int8" else FP8_LIMIT
    heads = absmax.float().amax(1, keepdim=True)
    heads = torch.where(heads > 0, heads, 1.0)
    if config.granularity == "channel":
        common = absmax.float().quantile(COMMON_QUANTILE, dim=1, keepdim=True, interpolation="lower")
        reach = torch.maximum(absmax.float(), torch.maximum(common, heads * SMALLEST_SHARE))
    else:
        reach = (heads if config.granularity == "head" else heads.amax().expand_as(heads)).expand_as(absmax)
    return (reach * (config.margin / limit)).contiguous()


def few_tokens_note(config: KVCacheConfig) -> list[str]:
    """What the user should know of a calibration that saw little text."""
    if config.method != "absmax" or config.num_tokens >= FEW_TOKENS:
        return []
    return [f"the KV cache is calibrated on {config.num_tokens} tokens; {FEW_TOKENS} or more are needed for scales that fit other text"]


class KVObserver:
    """Largest magnitudes of one layer's keys and values by head and channel, over the batches that it is shown.

    k_absmax, v_absmax: float32 [num_kv_heads, D], None before the first batch.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.k_absmax: torch.Tensor | None = None
        self.v_absmax: torch.Tensor | None = None
        self.num_tokens = 0

    def __call__(self, cache: tuple[torch.Tensor, torch.Tensor], slot_mapping: torch.Tensor) -> None:
        """One batch: the layer's cache, in the run's dtype, and where its tokens were stored (int64 [T])."""
        import torch

        keys, values = self._kernels.read_kv(*cache, slot_mapping)
        k_absmax, v_absmax = (stored.float().abs().amax(0) for stored in (keys, values))
        self.k_absmax = k_absmax if self.k_absmax is None else torch.maximum(self.k_absmax, k_absmax)
        self.v_absmax = v_absmax if self.v_absmax is None else torch.maximum(self.v_absmax, v_absmax)
        self.num_tokens += int(slot_mapping.shape[0])

    def tensors(self, layer: int, config: KVCacheConfig) -> dict[str, torch.Tensor]:
        """The engine's two tensors of the layer. Raises InputError for keys or values that are not finite, ValueError before any batch."""
        if self.k_absmax is None or self.v_absmax is None:
            raise ValueError(f"layer {layer} has seen no token")
        found = {}
        for name, absmax in zip(scale_names(layer), (self.k_absmax, self.v_absmax), strict=True):
            if not bool(absmax.isfinite().all()):
                kind = "keys" if name.endswith("k_scale") else "values"
                raise InputError(f"layer {layer} computes {kind} that are not finite", "the checkpoint is damaged: use another copy")
            found[name] = kv_scales(absmax, config).cpu()
        return found
