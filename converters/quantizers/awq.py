"""AWQ: scale the inputs of linears so that the channels that matter lose least, then clip each group where it pays.

    search_scales   one factor for each input channel of the linears that read one operation (`converters.scaling` moves them into it)
    quantize_awq    codes of one linear, scaled before or not, with a limit for each group of inputs

The two do not know each other: scales may as well go before GPTQ. Errors come from second moments (`awq_errors`): nothing is run over
tokens here. In three things this is not AutoAWQ: no scaling at all is a candidate; scales are compared with the limits that follow (those
that are best without limits are often no better than none once there are limits); and q and k are clipped like the others.

N outputs, K inputs, G groups of g inputs, C candidates. Source: AWQ (arXiv 2306.00978), and the grids that AutoAWQ 0.2.9 searches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from dspark.converters.quantizers.awq_errors import Reader, clip_search, output_errors
from dspark.converters.quantizers.base import DEFAULTS, QuantizedWeight, SolverOptions
from dspark.converters.quantizers.integers import Codes, Problem, integer_problem, stored
from dspark.converters.quantizers.measure import decibels, energy, output_energy
from dspark.converters.quantizers.rtn import quantize_rtn
from dspark.converters.quantizers.statistics import LayerStatistics
from dspark.converters.threads import map_slices, one_torch_thread
from dspark.kernels.quant_math import round_to_codes
from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.spec.quant import QuantScheme

RATIOS = tuple(step / 20 for step in range(20))
"""Exponents of the activations' magnitude that are tried."""
FINALISTS = 2
"""Candidates whose error is computed in full: those with the best estimates, which leave out what two inputs have in common and try every
second limit, in a tenth of the time."""
Legal = Callable[[torch.Tensor], torch.Tensor]
"""scales [C, K] -> the nearest that can be moved (`ScalingGroup.legal_scales`)"""


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


def search_scales(
    name: str,
    readers: Sequence[Reader],
    observed: LayerStatistics,
    legal: Legal | None = None,
    duo: bool = True,
    exhaustive: bool = False,
) -> AwqResult:
    """The scales of the linears that read one operation's result: the best of RATIOS, or none where none of them is better than none.

    name: of the operation, for errors. readers: the linears that will be quantized, dense ones left out. observed: of all tokens that the
    operation made. duo: divide by the weights' own magnitude too. exhaustive: compute every candidate in full. No input is changed. Raises
    InputError when no candidate has a finite error.
    """
    unscaled = torch.ones(1, observed.num_inputs)
    readers = [reader for reader in readers if reader.statistics.num_tokens > 0]
    if not readers or observed.num_tokens == 0:
        return AwqResult(unscaled[0], None, 0.0, 0.0, {})
    candidates = candidate_scales(observed.mean_abs, weight_magnitude(readers) if duo else None, legal)
    chosen = list(range(len(RATIOS)))
    if not exhaustive:
        chosen = _finalists(name, readers, candidates, observed.num_tokens)
    errors = output_errors(readers, torch.cat([unscaled, candidates[chosen]]), observed.num_tokens)
    without, losses = float(errors[0]), _finite(name, errors[1:])
    best = int(losses.argmin())
    shown = {RATIOS[index]: loss for index, loss in zip(chosen, losses.tolist(), strict=True)}
    if losses[best] >= without:
        return AwqResult(unscaled[0], None, without, without, shown)
    return AwqResult(candidates[chosen[best]], RATIOS[chosen[best]], float(losses[best]), without, shown)


def _finalists(name: str, readers: Sequence[Reader], candidates: torch.Tensor, num_tokens: int) -> list[int]:
    """Indices of the candidates that look best, ascending. Large ratios are only looked at where the best of the others is at their end."""
    half = len(RATIOS) // 2
    estimates = _finite(name, output_errors(readers, candidates[:half], num_tokens, estimate=True))
    if int(estimates.argmin()) >= half - FINALISTS:
        estimates = _finite(name, torch.cat([estimates, output_errors(readers, candidates[half:], num_tokens, estimate=True)]))
    return sorted(estimates.argsort(stable=True)[:FINALISTS].tolist())


def _finite(name: str, errors: torch.Tensor) -> torch.Tensor:
    """The errors, those that are no numbers made infinite. Raises InputError when none is finite."""
    if not bool(errors.isfinite().any()):
        raise InputError(f"AWQ finds no finite error for the scales of {name}", "the checkpoint or the calibration has values out of range")
    return errors.nan_to_num(nan=float("inf"))


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


def _clip_and_round(problem: Problem, scheme: QuantScheme, statistics: LayerStatistics) -> tuple[Codes, torch.Tensor]:
    """The codes and what they are off by [K, N]."""
    search = clip_search(scheme, statistics)
    grid, unscaled = replace(problem.grid, clip=False), torch.ones(problem.num_inputs // problem.group_size, problem.group_size)
    codes, difference = torch.empty(problem.weight.shape, dtype=torch.uint8), torch.empty_like(problem.weight)

    def round_outputs(outputs: slice) -> tuple[torch.Tensor, torch.Tensor]:
        groups = problem.weight[:, outputs].unflatten(0, (-1, problem.group_size)).contiguous()
        limit = search(groups, unscaled)[:, None]
        step, zero = grid.steps(groups.clamp(-limit, limit))
        chosen = round_to_codes(groups, step[:, None], zero[:, None], grid.bits)
        codes[:, outputs] = chosen.flatten(0, 1)
        difference[:, outputs] = chosen.sub_(zero[:, None]).mul_(step[:, None]).sub_(groups).flatten(0, 1)
        return step, zero

    with one_torch_thread():
        steps, zeros = zip(*map_slices(round_outputs, problem.slices()), strict=True)
    return Codes(codes, torch.cat(steps, 1), torch.cat(zeros, 1)), difference
