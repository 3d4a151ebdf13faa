"""What the solvers of integer codes share: the weight with its inputs first, its grid, and the canonical storage of what they choose.

K inputs, N outputs, G groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dspark.converters.quantizers.base import AnyWeight, SolverOptions
from dspark.converters.quantizers.grid import Grid, choose_grid
from dspark.converters.quantizers.measure import all_finite
from dspark.kernels.ops import Int8Weight, Wna16Weight
from dspark.kernels.packing import pack_codes
from dspark.runtime.spec.cores import usable_cores
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.quant import QuantScheme

_MAX_SLICE_BYTES = 4 << 20
_LANES = 64


@dataclass(frozen=True)
class Problem:
    """A weight to be quantized. weight float32 or float64 [K, N], contiguous; group_size divides K."""

    weight: torch.Tensor
    grid: Grid
    group_size: int

    @property
    def num_inputs(self) -> int:
        return int(self.weight.shape[0])

    @property
    def num_outputs(self) -> int:
        return int(self.weight.shape[1])

    def slices(self) -> list[slice]:
        """Ranges of outputs for the cores to share."""
        return output_slices(self.num_inputs, self.num_outputs)


def output_slices(num_inputs: int, num_outputs: int) -> list[slice]:
    """Ranges of outputs for the cores to share: what happens to an output depends on no other."""
    most = max(_LANES, _MAX_SLICE_BYTES // (num_inputs * 4))
    count = max(math.ceil(num_outputs / most), min(usable_cores(), math.ceil(num_outputs / _LANES)))
    width = math.ceil(num_outputs / count / _LANES) * _LANES
    return [slice(start, min(start + width, num_outputs)) for start in range(0, num_outputs, width)]


@dataclass(frozen=True)
class Codes:
    """codes uint8 [K, N]; scale [G, N] and zero [G, N] in the weight's type; perm int64 [K] or None: stored row j is input perm[j]."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    perm: torch.Tensor | None = None


def integer_problem(weight: torch.Tensor, scheme: QuantScheme, options: SolverOptions) -> Problem:
    """The problem of a weight [N, K]. Raises InputError for values that are not finite, ValueError for groups that do not fit."""
    if scheme.storage not in ("wna16", "int8"):
        raise ValueError(f"storage {scheme.storage} has no integer codes")
    if not all_finite(weight):
        raise InputError("the weight has values that are not finite", "the checkpoint is damaged: use another copy")
    inputs = weight.shape[1]
    group_size = inputs if scheme.storage == "int8" else scheme.resolved_group_size(inputs)
    if inputs % group_size:
        raise ValueError(f"group size {group_size} does not divide {inputs} inputs")
    turned = weight.t().contiguous()
    return Problem(turned, choose_grid(turned, scheme, group_size, options), group_size)


def stored(codes: Codes, problem: Problem, scheme: QuantScheme) -> AnyWeight:
    """The canonical storage of chosen codes."""
    if scheme.storage == "int8":
        signed = (codes.codes.to(torch.int16) - 2 ** (scheme.weight_bits - 1)).to(torch.int8)
        return Int8Weight(signed.t().contiguous(), codes.scale[0].float())
    return Wna16Weight(
        qweight=pack_codes(codes.codes, scheme.weight_bits),
        scales=codes.scale.to(problem.grid.step_dtype),
        zeros=None if scheme.symmetric else codes.zero.to(torch.uint8),
        bits=scheme.weight_bits,
        in_features=problem.num_inputs,
        perm=None if codes.perm is None else codes.perm.to(torch.int32),
    )
