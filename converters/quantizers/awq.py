"""AWQ: scale the inputs of linears so that the channels that matter lose least, then clip each group where it pays.

    search_scales   one factor for each input channel of the linears that read one operation (`converters.scaling` moves them into it)
    quantize_awq    codes of one linear, scaled before or not, with a limit for each group of inputs

The two do not know each other: scales may as well go before GPTQ.

Nothing is run over tokens here. With D the error of a weight and H = (2 / n) sum x x^T the statistics of its inputs, the squared error of
the linear's outputs, a mean over all n tokens, is tr(D H D^T) / 2; within a group of inputs alone, its block of H takes H's place.

N outputs, K inputs, G groups of g inputs, C candidates. Source: AWQ (arXiv 2306.00978), and the grids that AutoAWQ 0.2.9 searches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dspark.converters.quantizers.awq_loops import MAGIC, rounding_errors, scaled_ranges
from dspark.converters.quantizers.base import DEFAULTS, QuantizedWeight, SolverOptions
from dspark.converters.quantizers.integers import Codes, Problem, integer_problem, stored
from dspark.converters.quantizers.measure import decibels, energy, output_energy
from dspark.converters.quantizers.rtn import quantize_rtn
from dspark.converters.quantizers.statistics import LayerStatistics
from dspark.converters.threads import map_slices, one_torch_thread
from dspark.kernels.quant_math import group_range, round_to_codes, zero_point
from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.spec.quant import QuantScheme

RATIOS = tuple(step / 20 for step in range(20))
"""Exponents of the activations' magnitude that are tried."""
CLIP_RATIOS = tuple(1 - step / 20 for step in range(10))
"""Shares of a group's largest weight that are tried as its limit."""
UNCLIPPED = ("q_proj", "k_proj")
FINALISTS = 6
"""Candidates whose error is computed in full. The others are sorted out by the error that they had if no two inputs were related, which
takes a tenth of the time: of the 40 groups of every third layer of SmolLM2-135M, the best candidate was among the first 6 in all."""
_CHUNK_ELEMENTS = 1 << 17  # a chunk of rows and its copies stay in the cache through all candidates
_MIN_CHUNK_ROWS = 64
_HALF = torch.finfo(torch.float16)
_STRIP = 96  # inputs of a product that uses symmetry: half of the arithmetic is saved, and products stay wide

Rule = Callable[[torch.Tensor, torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]
"""(smallest and largest value of each group, bits, symmetric) -> step and zero point: what numbers are rounded to."""
Legal = Callable[[torch.Tensor], torch.Tensor]
"""scales [C, K] -> the nearest that can be moved (`ScalingGroup.legal_scales`)"""


@dataclass(frozen=True, eq=False)
class Reader:
    """A linear whose inputs get scales. weight float32 [N, K]; scheme it will have; statistics of its inputs (an expert has its own)."""

    weight: torch.Tensor
    scheme: QuantScheme
    statistics: LayerStatistics

    def chunks(self) -> Iterator[torch.Tensor]:
        """The weight in chunks of rows, inputs first: contiguous [G, g, R]."""
        inputs = int(self.weight.shape[1])
        size = self.scheme.resolved_group_size(inputs)
        for rows in self.weight.split(max(_MIN_CHUNK_ROWS, _CHUNK_ELEMENTS // inputs)):
            yield rows.t().contiguous().unflatten(0, (-1, size))


@dataclass(frozen=True, eq=False)
class AwqResult:
    """What a search found. scales float32 [K]: factors of the linears' columns. ratio: the exponent, None for no scaling at all.

    loss, unscaled_loss: squared error of all linears' outputs for one token, with the scales and without any. losses: the same by exponent,
    of the finalists; empty where no token was seen.
    """

    scales: torch.Tensor
    ratio: float | None
    loss: float
    unscaled_loss: float
    losses: dict[float, float]


def step_rule(low: torch.Tensor, high: torch.Tensor, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The steps of all our quantizers, as they are stored: in float16, or float32 where they leave float16's normal range.

    An unrounded one would say little of the largest weight of a symmetric group, which lies right between two codes.
    """
    low, high = group_range(low, high, symmetric)
    step = (high - low) / (2**bits - 1)
    half = step.half().float()
    step = torch.where((half >= _HALF.tiny) & half.isfinite(), half, step)
    return step, zero_point(low, step, bits, symmetric)


def search_scales(
    name: str,
    readers: Sequence[Reader],
    observed: LayerStatistics,
    legal: Legal | None = None,
    duo: bool = True,
    rule: Rule = step_rule,
    finalists: int = FINALISTS,
) -> AwqResult:
    """The scales of the linears that read one operation's result: the best of RATIOS, or none where none of them is better than none.

    name: of the operation, for errors. readers: the linears that will be quantized, dense ones left out. observed: of all tokens that the
    operation made. duo: divide by the weights' own magnitude too. No input is changed. Raises InputError when no candidate has a finite
    error.
    """
    unscaled = torch.ones(1, observed.num_inputs)
    readers = [reader for reader in readers if reader.statistics.num_tokens > 0]
    if not readers or observed.num_tokens == 0:
        return AwqResult(unscaled[0], None, 0.0, 0.0, {})
    candidates = candidate_scales(observed.mean_abs, weight_magnitude(readers) if duo else None, legal)
    estimates = output_errors(readers, candidates, observed.num_tokens, rule, related=False)
    chosen = sorted(estimates.nan_to_num(nan=float("inf")).argsort(stable=True)[:finalists].tolist())
    errors = output_errors(readers, torch.cat([unscaled, candidates[chosen]]), observed.num_tokens, rule)
    if not bool(errors[1:].isfinite().any()):
        raise InputError(f"AWQ finds no finite error for the scales of {name}", "the checkpoint or the calibration has values out of range")
    without, losses = float(errors[0]), errors[1:].nan_to_num(nan=float("inf"))
    best = int(losses.argmin())
    shown = {RATIOS[index]: loss for index, loss in zip(chosen, losses.tolist(), strict=True)}
    if not losses[best] < without:
        return AwqResult(unscaled[0], None, without, without, shown)
    return AwqResult(candidates[chosen[best]], RATIOS[chosen[best]], float(losses[best]), without, shown)


def weight_magnitude(readers: Sequence[Reader]) -> torch.Tensor:
    """Mean over all rows of |w| / (the largest of its group) [K]."""
    total = torch.zeros(readers[0].weight.shape[1], dtype=torch.float64)
    for reader in readers:
        for groups in reader.chunks():
            sizes = groups.abs()
            total += (sizes / (sizes.amax(1, keepdim=True) + 1e-6)).sum(-1).flatten()
    return (total / sum(len(reader.weight) for reader in readers)).float()


def candidate_scales(mean_abs: torch.Tensor, magnitude: torch.Tensor | None, legal: Legal | None = None) -> torch.Tensor:
    """Scales [C, K], one row for each of RATIOS: mean_abs ** r / (magnitude ** (1 - r) + 1e-4), or without a magnitude mean_abs ** r.

    Scaled so that the largest times the smallest is 1. A channel that never was active keeps 1: nothing is known about it, and the formula
    would give it the smallest scale of all, so that rounding would lose its weights.
    """
    ratios = torch.tensor(RATIOS)[:, None]
    scales = mean_abs**ratios
    if magnitude is not None:
        scales = scales / (magnitude ** (1 - ratios) + 1e-4)
    scales = scales.clamp(min=1e-4)
    known = (mean_abs > 0) & scales.isfinite()
    largest = scales.masked_fill(~known, 0.0).amax(1, keepdim=True)
    smallest = scales.masked_fill(~known, float("inf")).amin(1, keepdim=True)
    scales = torch.where(known, scales / (largest * smallest).sqrt(), 1.0)
    return scales if legal is None else legal(scales)


def output_errors(
    readers: Sequence[Reader], scales: torch.Tensor, num_tokens: int, rule: Rule = step_rule, related: bool = True
) -> torch.Tensor:
    """Squared error of all readers' outputs for one of num_tokens tokens, with each of the scales [C, K]: float64 [C].

    related: False leaves out the products of different inputs. They add little, since the errors of rounding are nearly unrelated.
    """
    total = torch.zeros(len(scales), dtype=torch.float64)
    with one_torch_thread():
        for reader in readers:
            hessian = reader.statistics.hessian
            weighting = hessian if related else hessian.diagonal().contiguous()
            parts = map_slices(_chunk_errors(reader.scheme, scales, rule, weighting), reader.chunks())
            total += torch.stack(parts).sum(0) * (reader.statistics.num_tokens / num_tokens / 2)
    return total


def _chunk_errors(scheme: QuantScheme, scales: torch.Tensor, rule: Rule, weighting: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Groups [G, g, R] -> tr(D H D^T) with each of the scales: float64 [C]. weighting: H [K, K], or its diagonal [K] instead of it."""

    def errors(groups: torch.Tensor) -> torch.Tensor:
        found = []
        for scale in scales.unflatten(1, groups.shape[:2]):
            step, zero = rule(*_scaled_range(groups, scale), scheme.weight_bits, scheme.symmetric)
            found.append(weighted_square(_error(groups, scale, step, zero, scheme.weight_bits).flatten(0, 1), weighting))
        return torch.tensor(found, dtype=torch.float64)

    return errors


def _scaled_range(groups: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value [G, R] of groups [G, g, R] times scale [G, g]."""
    low, high = groups.new_empty((2, groups.shape[0], groups.shape[2]))
    scaled_ranges(groups.numpy(), scale.numpy(), low.numpy(), high.numpy())
    return low, high


def _error(groups: torch.Tensor, scale: torch.Tensor, step: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    """What rounding with step and zero [G, R] makes of groups [G, g, R] times scale [G, g], over scale, less the groups."""
    error = torch.empty_like(groups)
    max_code = np.float32(2**bits - 1)
    rounding_errors(groups.numpy(), scale.numpy(), step.numpy(), zero.numpy(), max_code, MAGIC, error.numpy())
    return error


def weighted_square(columns: torch.Tensor, weighting: torch.Tensor) -> float:
    """tr(D H D^T) of columns = D^T [K, R], for a symmetric H [K, K], of which only the lower half is read, or for a diagonal one [K]."""
    if weighting.ndim == 1:
        return float(torch.linalg.vector_norm(columns, dim=1).square() @ weighting)
    total = 0.0
    for start in range(0, columns.shape[0], _STRIP):
        inputs = slice(start, start + _STRIP)
        strip = columns[inputs]
        product = weighting[inputs, inputs] @ strip
        if start:
            product.add_(weighting[inputs, :start] @ columns[:start], alpha=2)
        total += float(product.mul_(strip).sum())
    return total


def quantize_awq(
    weight: torch.Tensor, scheme: QuantScheme, statistics: LayerStatistics | None = None, options: SolverOptions = DEFAULTS
) -> QuantizedWeight:
    """Canonical storage of a weight float32 [N, K], already scaled where it shall be, with each group clipped to its best limit.

    Without statistics of a token, or with options.clip off, rounding to nearest does what is left; the notes say the former. Raises
    InputError for values that are not finite, ValueError for a group size that does not divide K, UsageError for a scheme without integer
    codes.
    """
    if scheme.storage == "fp8":
        raise UsageError(f"--method awq chooses integer codes, {scheme.name} has none", "type --method rtn")
    if statistics is None or statistics.num_tokens == 0:
        return replace(quantize_rtn(weight, scheme, None, options), notes=("rounded to nearest: no tokens reached this layer",))
    if not options.clip:
        return quantize_rtn(weight, scheme, statistics, options)
    problem = integer_problem(weight.float(), scheme, options)
    codes, difference = _clip_and_round(problem, scheme, statistics)
    hessian = statistics.hessian
    return QuantizedWeight(
        stored(codes, problem, scheme),
        decibels(energy(problem.weight), energy(difference)),
        decibels(output_energy(problem.weight, hessian), output_energy(difference, hessian)),
    )


def solver_options(module: str, options: SolverOptions) -> SolverOptions:
    """The options for one module: q and k keep their whole range. What counts there is the product of both, not what each puts out."""
    return replace(options, clip=False) if module.endswith(UNCLIPPED) else options


def _clip_and_round(problem: Problem, scheme: QuantScheme, statistics: LayerStatistics) -> tuple[Codes, torch.Tensor]:
    """The codes and what they are off by [K, N]."""
    search = clip_search(scheme, statistics, problem.group_size)
    grid = replace(problem.grid, clip=False)
    codes, difference = torch.empty(problem.weight.shape, dtype=torch.uint8), torch.empty_like(problem.weight)

    def round_outputs(outputs: slice) -> tuple[torch.Tensor, torch.Tensor]:
        groups = problem.weight[:, outputs].unflatten(0, (-1, problem.group_size)).contiguous()
        limit = search(groups)[:, None]
        step, zero = grid.steps(groups.clamp(-limit, limit))
        chosen = round_to_codes(groups, step[:, None], zero[:, None], grid.bits)
        codes[:, outputs] = chosen.flatten(0, 1)
        difference[:, outputs] = chosen.sub_(zero[:, None]).mul_(step[:, None]).sub_(groups).flatten(0, 1)
        return step, zero

    with one_torch_thread():
        steps, zeros = zip(*map_slices(round_outputs, problem.slices()), strict=True)
    return Codes(codes, torch.cat(steps, 1), torch.cat(zeros, 1)), difference


def clip_search(
    scheme: QuantScheme, statistics: LayerStatistics, group_size: int, rule: Rule = step_rule
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Groups [G, g, R] -> the largest |w| that each keeps [G, R]: of CLIP_RATIOS of its own largest, the one with the smallest squared
    error of the group's share of the outputs.

    A limit sets the range that codes reach; what lies beyond takes the last code. (AutoAWQ cuts weights to the limit before, which is the
    same but for the lowest symmetric code: it then never uses that.)
    """
    by_group = statistics.hessian.unflatten(1, (-1, group_size)).unflatten(0, (-1, group_size))
    blocks = by_group.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
    unscaled = torch.ones(blocks.shape[:2])

    def limits(groups: torch.Tensor) -> torch.Tensor:
        low, high = groups.amin(1), groups.amax(1)
        largest = torch.maximum(-low, high)
        best, smallest = largest, torch.full_like(largest, float("inf"))
        for ratio in CLIP_RATIOS:
            limit = largest * ratio
            step, zero = rule(torch.maximum(low, -limit), torch.minimum(high, limit), scheme.weight_bits, scheme.symmetric)
            error = _error(groups, unscaled, step, zero, scheme.weight_bits)
            loss = torch.bmm(blocks, error).mul_(error).sum(1)
            better = loss < smallest
            best, smallest = torch.where(better, limit, best), torch.where(better, loss, smallest)
        return best

    return limits
