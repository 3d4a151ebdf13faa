"""GPTQ: codes are chosen one input after the other, and the inputs still to come make up for the error so far (Frantar et al. 2022).

With U^T U = H^-1, H the second moments of the layer's inputs, the error of input i over U[i, i], times row i of U, is what the later
weights are reduced by: no other choice of them leaves a smaller error of the outputs. Groups and the order of treatment are AutoGPTQ's;
with `SolverOptions.legacy` the codes are too. GPTAQ (Li et al. 2025) adds the correction for inputs that are themselves off.

Outputs do not depend on each other, so the cores share them; weights stand inputs first, so that a vector holds an input's weights of
neighbouring outputs. K inputs, N outputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dspark.converters.quantizers.base import DEFAULTS, QuantizedWeight, SolverOptions, stored_scheme
from dspark.converters.quantizers.factor import HessianFactor, hessian_factor
from dspark.converters.quantizers.fp8 import quantize_fp8
from dspark.converters.quantizers.in_order import solve_in_order
from dspark.converters.quantizers.integers import Codes, Problem, integer_problem, stored
from dspark.converters.quantizers.loops import magic, solve_block
from dspark.converters.quantizers.measure import decibels, energy, output_energy
from dspark.converters.quantizers.rounded_inputs import with_input_error
from dspark.converters.quantizers.rtn import quantize_rtn
from dspark.converters.quantizers.statistics import LayerStatistics
from dspark.converters.threads import map_slices
from dspark.kernels.ops import Wna16Weight
from dspark.runtime.spec.quant import QuantScheme


def quantize_gptq(
    weight: torch.Tensor, scheme: QuantScheme, statistics: LayerStatistics | None = None, options: SolverOptions = DEFAULTS
) -> QuantizedWeight:
    """Canonical storage of a weight float32 [N, K] in any scheme.

    Without statistics of enough tokens, or when no damping makes their Hessian positive definite, the weight is rounded to nearest, and
    the notes say so. The outputs' error has that of inputs that the scheme rounds in it. Raises InputError for values that are not finite,
    ValueError for a group size that does not divide K.
    """
    if statistics is None or statistics.num_tokens < options.min_tokens:
        count = 0 if statistics is None else statistics.num_tokens
        reached = "no tokens" if count == 0 else f"only {count} tokens"
        return _fall_back(weight, scheme, statistics, options, f"{reached} reached this layer")
    result = _quantize(weight, scheme, statistics, options)
    return with_input_error(result, weight, scheme, statistics)


def _quantize(weight: torch.Tensor, scheme: QuantScheme, statistics: LayerStatistics, options: SolverOptions) -> QuantizedWeight:
    factor = hessian_factor(statistics, options)
    if factor is None:
        return _fall_back(weight, scheme, None, options, "no damping makes the Hessian positive definite")
    if scheme.storage == "fp8":
        return quantize_fp8(weight, scheme, statistics, options, factor)
    problem = integer_problem(weight.float(), scheme, options)
    solution = solve(problem, factor, options)
    difference = solution.values.sub_(problem.weight)
    noise = energy(difference)
    if options.gptaq_alpha is None and not options.legacy:
        output_noise = 2 * solution.loss - float((difference.square().sum(1) * factor.added).sum())
    else:
        output_noise = output_energy(difference, statistics.hessian)
    return QuantizedWeight(
        stored(solution.codes, problem, scheme),
        decibels(energy(problem.weight), noise),
        decibels(output_energy(problem.weight, statistics.hessian), output_noise),
        loss=solution.loss,
        damp_used=round(factor.damp, 6),
        notes=_notes(factor),
    )


def _fall_back(
    weight: torch.Tensor, scheme: QuantScheme, statistics: LayerStatistics | None, options: SolverOptions, why: str
) -> QuantizedWeight:
    result = quantize_rtn(weight, scheme, statistics, options)
    if stored_scheme(scheme, options).act_order and isinstance(result.weight, Wna16Weight):  # layers of one scheme are stored alike
        result = replace(result, weight=replace(result.weight, perm=torch.arange(weight.shape[1], dtype=torch.int32)))
    return replace(result, notes=(*result.notes, f"rounded to nearest: {why}"))


def _notes(factor: HessianFactor) -> tuple[str, ...]:
    if not factor.failures:
        return ()
    times = "once" if factor.failures == 1 else f"{factor.failures} times"
    return (f"the Hessian could not be factorized {times}; damping {factor.damp:.2g}",)


@dataclass(frozen=True)
class Solution:
    """values [K, N]: what the codes stand for, in the order of the inputs. loss: half the sum of squared errors over U's diagonal."""

    codes: Codes
    values: torch.Tensor
    loss: float


def solve(problem: Problem, factor: HessianFactor, options: SolverOptions) -> Solution:
    """The codes of a weight. The factor has the weight's dtype."""
    codes = torch.empty(problem.weight.shape, dtype=torch.uint8)
    values = torch.empty_like(problem.weight)
    order = factor.order

    def solve_outputs(outputs: slice) -> _Outputs:
        part = _Outputs(problem, factor, options, outputs)
        part.run()
        values[order, outputs] = part.weight
        if part.follows_order:
            codes[:, outputs] = part.codes
        else:
            codes[order, outputs] = part.codes
        return part

    parts = map_slices(solve_outputs, problem.slices())
    scale, zero = torch.cat([part.scale for part in parts], 1), torch.cat([part.zero for part in parts], 1)
    permuted = parts[0].follows_order and options.act_order
    return Solution(Codes(codes, scale, zero, order if permuted else None), values, sum(part.loss for part in parts))


class _Outputs:
    """The work on a slice of outputs. weight [K, R]: in the order of treatment; what the codes stand for, once they are chosen."""

    def __init__(self, problem: Problem, factor: HessianFactor, options: SolverOptions, outputs: slice) -> None:
        self._factor, self._grid, self._options = factor, problem.grid, options
        self._group_size = problem.group_size
        whole = problem.group_size == problem.num_inputs
        self.follows_order = not (options.static_groups or whole)
        original = problem.weight[:, outputs].clone(memory_format=torch.contiguous_format)
        num_groups = problem.num_inputs // problem.group_size
        self.scale = torch.empty(num_groups, original.shape[1], dtype=original.dtype)
        self.zero = torch.empty_like(self.scale)
        if whole:
            self._choose_steps(original, 0, None)
        if options.legacy:
            original[factor.dead] = 0
        if not whole and not self.follows_order:
            self._choose_steps(original, 0, None)
        self.weight = original[factor.order]
        in_order = torch.arange(problem.num_inputs) if self.follows_order else factor.order
        self._group_of = in_order // problem.group_size
        self.codes = torch.empty(self.weight.shape, dtype=torch.uint8)
        self.loss = 0.0

    def run(self) -> None:
        """Choose all codes, block by block."""
        self.loss = solve_in_order(self.weight, self._factor, self._options.block_columns, self._solve_block)

    def _start_groups(self, start: int, stop: int) -> None:
        """Choose the steps of groups that begin in a block from the weights as they are before it: AutoGPTQ's way, and no worse."""
        first, end = -(-start // self._group_size), -(-stop // self._group_size)
        if first < end:
            self._choose_steps(self.weight[first * self._group_size : end * self._group_size], first, self._factor.order)

    def _choose_steps(self, weight: torch.Tensor, first_group: int, order: torch.Tensor | None) -> None:
        groups = weight.reshape(-1, self._group_size, weight.shape[1])
        importance = self._factor.importance if order is None else self._factor.importance[order]
        rows = slice(first_group, first_group + len(groups))
        self.scale[rows], self.zero[rows] = self._grid.steps(groups, importance.view(-1, self._group_size)[rows])

    def _solve_block(self, start: int, stop: int) -> torch.Tensor:
        if self.follows_order:
            self._start_groups(start, stop)
        block = self.weight[start:stop].numpy()
        upper = self._factor.upper[start:stop, start:stop].contiguous().numpy()
        pull = self._factor.pull
        near = torch.empty(0, 0, dtype=self.weight.dtype) if pull is None else pull[start:stop, start:stop].contiguous()
        errors = torch.empty_like(self.weight[start:stop])
        max_code = block.dtype.type(self._grid.max_code)
        solve_block(
            block,
            upper,
            near.numpy(),
            self._group_of[start:stop].numpy(),
            self.scale.numpy(),
            self.zero.numpy(),
            max_code,
            magic(block.dtype),
            self.codes[start:stop].numpy(),
            errors.numpy(),
        )
        return errors
