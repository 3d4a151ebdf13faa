"""The scaling methods on one layer: for each operation the best factors of its result, moved from the linears that read it into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from dspark.converters.quantizers.awq import Reader, search_scales
from dspark.converters.quantizers.smoothquant import smooth_scales
from dspark.converters.quantizers.statistics import LayerStatistics
from dspark.converters.scaling.fold import fold_group, storable_scales
from dspark.converters.scaling.groups import VALUE_OUT, ScalingGroup, awq_groups, smoothquant_groups
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import QuantConfig

GROUPS = {"awq": awq_groups, "smoothquant": smoothquant_groups}


@dataclass
class ScaledLayer:
    """A layer after scaling. tensors: float32; observed: statistics of the scaled inputs; notes: module -> in words.

    value_scales: what the attention's values are divided by [num_kv_heads * head_dim], None for nothing.
    """

    tensors: dict[str, torch.Tensor]
    observed: dict[str, LayerStatistics]
    notes: dict[str, str] = field(default_factory=dict)
    value_scales: torch.Tensor | None = None


def scale_layer(
    method: str,
    model: ModelConfig,
    index: int,
    state: Mapping[str, torch.Tensor],
    observed: Mapping[str, LayerStatistics],
    quant: QuantConfig,
    dtype: torch.dtype,
) -> ScaledLayer:
    """Scale one layer's groups in order of use. method: one of GROUPS. state: its tensors by name; dtype: of its norms in the engine.

    Nothing given is changed.

    A group none of whose linears is quantized, or that no token reached, is left alone.
    """
    layer = ScaledLayer({name: tensor.float() for name, tensor in state.items()}, dict(observed))
    for group in GROUPS[method](model, index):
        readers = _readers(group, layer, quant)
        if not readers or group.observed not in layer.observed:
            continue
        found = _awq(group, readers, layer) if method == "awq" else _smooth(group, readers, layer)
        if found is None:
            continue
        scales, note = found
        if group.is_norm:
            scales = storable_scales(group, layer.tensors[f"{group.previous}.weight"], scales, dtype)
        layer.tensors |= fold_group(layer.tensors, group, scales)
        _rescale(layer, group, scales)
        layer.notes |= dict.fromkeys(group.linears, note)
        if group.kind == VALUE_OUT:
            layer.value_scales = group.previous_scales(scales)
    return layer


def _readers(group: ScalingGroup, layer: ScaledLayer, quant: QuantConfig) -> list[Reader]:
    readers = []
    for module in group.linears:
        scheme = quant.scheme_for(module)
        if scheme is not None and module in layer.observed:
            readers.append(Reader(layer.tensors[f"{module}.weight"], scheme, layer.observed[module]))
    return readers


def _awq(group: ScalingGroup, readers: list[Reader], layer: ScaledLayer) -> tuple[torch.Tensor, str] | None:
    result = search_scales(group.previous, readers, layer.observed[group.observed], group.legal_scales)
    if result.ratio is None:
        return None
    return result.scales, f"AWQ ratio {result.ratio:g}, error {result.loss / result.unscaled_loss:.2f} of unscaled"


def _smooth(group: ScalingGroup, readers: list[Reader], layer: ScaledLayer) -> tuple[torch.Tensor, str] | None:
    statistics = layer.observed[group.observed]
    if statistics.num_tokens == 0:
        return None
    weights = [reader.weight for reader in readers]
    scales, alpha = smooth_scales(statistics, weights)
    return group.legal_scales(scales), f"SmoothQuant alpha {alpha:g}"


def _rescale(layer: ScaledLayer, group: ScalingGroup, scales: torch.Tensor) -> None:
    """The readers' inputs are now smaller by the scales; readers that share an object go on sharing one."""
    renewed: dict[int, LayerStatistics] = {}
    for module in group.linears:
        before = layer.observed.get(module)
        if before is not None:
            layer.observed[module] = renewed.setdefault(id(before), replace(before.scaled(scales)))
