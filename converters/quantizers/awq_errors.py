"""What linears lose when their inputs are scaled, their groups clipped and their weights rounded: by second moments, without any token.

With D the error of a weight and H = (2 / n) sum x x^T the statistics of its inputs, the squared error of the linear's outputs, a mean over
all n tokens, is tr(D H D^T) / 2; within a group of inputs alone, its block of H takes H's place.

N outputs, K inputs, G groups of g inputs, R outputs of a chunk, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dspark.converters.quantizers.awq_loops import MAGIC, rounding_errors, scaled_ranges, smallest_errors
from dspark.converters.quantizers.statistics import LayerStatistics
from dspark.converters.threads import map_slices, one_torch_thread
from dspark.runtime.spec.quant import QuantScheme

CLIP_RATIOS = tuple(1 - step / 20 for step in range(10))
"""Shares of a group's largest weight that are tried as its limit."""
_CHUNK_ELEMENTS = 1 << 18  # a chunk of rows and its copies stay in the cache through all candidates
_MIN_CHUNK_ROWS = 64
_STRIP = 96  # inputs of a product that uses symmetry: half of the arithmetic is saved, and products stay wide

Measure = Callable[[torch.Tensor, torch.Tensor], float]
"""(groups [G, g, R], scale [G, g]) -> twice the squared error of their outputs for one token, a mean over the linear's own"""


@dataclass(frozen=True, eq=False)
class Reader:
    """A linear whose inputs get scales. weight float32 [N, K]; scheme it will have; statistics of its inputs (an expert has its own).

    clip: its groups will be clipped, and are in the search.
    """

    weight: torch.Tensor
    scheme: QuantScheme
    statistics: LayerStatistics
    clip: bool = True

    @property
    def group_size(self) -> int:
        return self.scheme.resolved_group_size(int(self.weight.shape[1]))

    def chunks(self) -> Iterator[torch.Tensor]:
        """The weight in chunks of rows, inputs first: contiguous [G, g, R]."""
        for rows in self.weight.split(max(_MIN_CHUNK_ROWS, _CHUNK_ELEMENTS // int(self.weight.shape[1]))):
            yield rows.t().contiguous().unflatten(0, (-1, self.group_size))


def clip_search(scheme: QuantScheme, statistics: LayerStatistics) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(groups [G, g, R], scale [G, g]) -> the largest |w * scale| that each group keeps [G, R]: of CLIP_RATIOS of its own largest, the one
    with the smallest squared error of the group's share of the outputs. statistics: of the inputs before they are scaled.

    A limit sets the range that codes reach; what lies beyond takes the last code. (AutoAWQ cuts weights to the limit before, which is the
    same but for the lowest symmetric code: it then never uses that.)
    """
    group_size = scheme.resolved_group_size(statistics.num_inputs)
    by_group = statistics.hessian.unflatten(1, (-1, group_size)).unflatten(0, (-1, group_size))
    blocks = by_group.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()

    def limits(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        low, high = _scaled_range(groups, scale)
        largest = torch.maximum(-low, high)
        best, smallest = largest, torch.full_like(largest, float("inf"))
        for ratio in CLIP_RATIOS:
            limit = largest * ratio
            error = _error(groups, scale, (low, high), limit, scheme)
            loss = torch.bmm(blocks, error).mul_(error).sum(1)
            better = loss < smallest
            best, smallest = torch.where(better, limit, best), torch.where(better, loss, smallest)
        return best

    return limits


def output_errors(readers: Sequence[Reader], scales: torch.Tensor, num_tokens: int, estimate: bool = False) -> torch.Tensor:
    """Squared error of all readers' outputs for one of num_tokens tokens, with each of the scales [C, K]: float64 [C].

    estimate: as if no two inputs were related, and with every second limit. The errors of rounding nearly are unrelated.
    """
    total = torch.zeros(len(scales), dtype=torch.float64)
    with one_torch_thread():
        for reader in readers:
            measure = _estimate(reader) if estimate else _exact(reader)

            def errors(groups: torch.Tensor, measure: Measure = measure) -> torch.Tensor:
                return torch.tensor([measure(groups, scale) for scale in scales.unflatten(1, groups.shape[:2])], dtype=torch.float64)

            total += torch.stack(map_slices(errors, reader.chunks())).sum(0) * (reader.statistics.num_tokens / num_tokens / 2)
    return total


def _estimate(reader: Reader) -> Measure:
    """The sum of the diagonal of H times squared errors."""
    ratios = np.array(CLIP_RATIOS[::2] if reader.clip else (1.0,), np.float32)
    moments = reader.statistics.hessian.diagonal().unflatten(0, (-1, reader.group_size))

    def measure(groups: torch.Tensor, scale: torch.Tensor) -> float:
        low, high = _scaled_range(groups, scale)
        smallest, importance = torch.empty_like(low), moments / scale.square()
        arrays = (tensor.numpy() for tensor in (groups, scale, importance, low, high))
        smallest_errors(*arrays, ratios, *_grid(reader.scheme), smallest.numpy())
        return float(smallest.sum(dtype=torch.float64))

    return measure


def _exact(reader: Reader) -> Measure:
    """tr(D H D^T), after the search for limits."""
    search = clip_search(reader.scheme, reader.statistics) if reader.clip else None

    def measure(groups: torch.Tensor, scale: torch.Tensor) -> float:
        low, high = _scaled_range(groups, scale)
        limit = torch.maximum(-low, high) if search is None else search(groups, scale)
        error = _error(groups, scale, (low, high), limit, reader.scheme)
        return weighted_square(error.flatten(0, 1), reader.statistics.hessian)

    return measure


def _scaled_range(groups: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value [G, R] of groups [G, g, R] times scale [G, g]."""
    low, high = groups.new_empty((2, groups.shape[0], groups.shape[2]))
    scaled_ranges(groups.numpy(), scale.numpy(), low.numpy(), high.numpy())
    return low, high


def _error(
    groups: torch.Tensor, scale: torch.Tensor, scaled_range: tuple[torch.Tensor, torch.Tensor], limit: torch.Tensor, scheme: QuantScheme
) -> torch.Tensor:
    """What rounding makes of groups [G, g, R] times scale [G, g], over scale, less the groups. limit [G, R]: of their range."""
    error = torch.empty_like(groups)
    arrays = (tensor.numpy() for tensor in (groups, scale, *scaled_range, limit))
    rounding_errors(*arrays, *_grid(scheme), error.numpy())
    return error


def _grid(scheme: QuantScheme) -> tuple[np.float32, bool, np.float32]:
    return np.float32(2**scheme.weight_bits - 1), scheme.symmetric, MAGIC


def weighted_square(columns: torch.Tensor, hessian: torch.Tensor) -> float:
    """tr(D H D^T) of columns = D^T [K, R] and a symmetric H [K, K], of which only the lower half is read."""
    total = 0.0
    for start in range(0, columns.shape[0], _STRIP):
        inputs = slice(start, start + _STRIP)
        strip = columns[inputs]
        product = hessian[inputs, inputs] @ strip
        if start:
            product.add_(hessian[inputs, :start] @ columns[:start], alpha=2)
        total += float(product.mul_(strip).sum())
    return total
