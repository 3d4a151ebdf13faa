"""Round to nearest: every weight becomes the nearest number of its group's grid, whatever the others become.

Needs no data. With statistics, an input weighs in the search for the clipping as much as its second moment, and the error of the outputs
is measured.
"""

from __future__ import annotations

import torch

from dspark.converters.quantizers.base import DEFAULTS, QuantizedWeight, SolverOptions
from dspark.converters.quantizers.fp8 import quantize_fp8
from dspark.converters.quantizers.integers import Codes, Problem, integer_problem, stored
from dspark.converters.quantizers.measure import decibels, energy, output_energy
from dspark.converters.quantizers.rounded_inputs import with_input_error
from dspark.converters.quantizers.statistics import LayerStatistics
from dspark.converters.threads import map_slices
from dspark.kernels.quant_math import round_to_codes
from dspark.runtime.spec.quant import QuantScheme


def quantize_rtn(
    weight: torch.Tensor, scheme: QuantScheme, statistics: LayerStatistics | None = None, options: SolverOptions = DEFAULTS
) -> QuantizedWeight:
    """Canonical storage of a weight float32 [N, K] in any scheme. The outputs' error has that of inputs that the scheme rounds in it.

    Raises InputError for values that are not finite, ValueError for a group size that does not divide K.
    """
    return with_input_error(_quantize(weight, scheme, statistics, options), weight, scheme, statistics)


def _quantize(weight: torch.Tensor, scheme: QuantScheme, statistics: LayerStatistics | None, options: SolverOptions) -> QuantizedWeight:
    if scheme.storage == "fp8":
        return quantize_fp8(weight, scheme, statistics, options)
    problem = integer_problem(weight.float(), scheme, options)
    known = statistics if statistics is not None and statistics.num_tokens > 0 else None
    codes, difference = _round(problem, None if known is None else damped_importance(known, options))
    noise = None if known is None else output_energy(difference, known.hessian)
    return QuantizedWeight(
        stored(codes, problem, scheme),
        decibels(energy(problem.weight), energy(difference)),
        None if known is None or noise is None else decibels(output_energy(problem.weight, known.hessian), noise),
    )


def damped_importance(statistics: LayerStatistics, options: SolverOptions) -> torch.Tensor:
    """Second moments [K] with a little of their mean added, so that no input counts for nothing."""
    diagonal = statistics.hessian.diagonal()
    return diagonal + options.damp * diagonal.mean()


def _round(problem: Problem, importance: torch.Tensor | None) -> tuple[Codes, torch.Tensor]:
    """The codes and what they are off by [K, N]."""
    group_size, grid = problem.group_size, problem.grid
    shares = None if importance is None else importance.reshape(-1, group_size)
    codes = torch.empty(problem.weight.shape, dtype=torch.uint8)
    difference = torch.empty_like(problem.weight)

    def round_outputs(outputs: slice) -> tuple[torch.Tensor, torch.Tensor]:
        groups = problem.weight[:, outputs].contiguous().view(-1, group_size, outputs.stop - outputs.start)
        scale, zero = grid.steps(groups, shares)
        chosen = round_to_codes(groups, scale[:, None], zero[:, None], grid.bits)
        codes[:, outputs] = chosen.view(problem.num_inputs, -1)
        difference[:, outputs] = chosen.sub_(zero[:, None]).mul_(scale[:, None]).sub_(groups).view(problem.num_inputs, -1)
        return scale, zero

    scales, zeros = zip(*map_slices(round_outputs, problem.slices()), strict=True)
    return Codes(codes, torch.cat(scales, 1), torch.cat(zeros, 1)), difference
