"""8-bit floating-point weights (e4m3): a scale for each block of outputs and inputs, and every weight the nearest number up to 448.

The steps grow with the numbers, so nothing is gained by clipping; but where between two powers of two a block's largest weight falls
decides how finely the others round. A few larger scales than the plain one, the largest weight over 448, are tried, and the one with the
smallest squared error is kept. N outputs, K inputs.

GPTQ chooses these numbers as it chooses integer codes, input after input; the scales are those of the weights before.
"""

from __future__ import annotations

import torch

from dspark.converters.quantizers.base import DEFAULTS, QuantizedWeight, SolverOptions
from dspark.converters.quantizers.factor import HessianFactor
from dspark.converters.quantizers.in_order import solve_in_order
from dspark.converters.quantizers.integers import output_slices
from dspark.converters.quantizers.loops import fp8_errors, solve_fp8_block
from dspark.converters.quantizers.measure import all_finite, decibels, energy, output_energy
from dspark.converters.quantizers.statistics import LayerStatistics
from dspark.converters.threads import map_slices
from dspark.kernels.ops import Fp8Weight
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.quant import QuantScheme

FP8_MAX = 448.0
SCALE_RATIOS = tuple(1 + step / 8 for step in range(8))
"""Of the plain scale; at 2 the numbers would be the same again, but for the smallest."""
_TINY = torch.finfo(torch.float32).tiny


def quantize_fp8(
    weight: torch.Tensor,
    scheme: QuantScheme,
    statistics: LayerStatistics | None = None,
    options: SolverOptions = DEFAULTS,
    factor: HessianFactor | None = None,
) -> QuantizedWeight:
    """Fp8Weight of a weight float32 [N, K]; blocks at the edges may be smaller. factor: choose the numbers in order, by GPTQ.

    The scale of static inputs is the largest that calibration saw, over 448; without statistics of a token it is 1 / 448. Raises InputError
    for values that are not finite.
    """
    if not all_finite(weight):
        raise InputError("the weight has values that are not finite", "the checkpoint is damaged: use another copy")
    weight = weight.float()
    known = statistics if statistics is not None and statistics.num_tokens > 0 else None
    importance = None if known is None else known.hessian.diagonal() + options.damp * known.hessian.diagonal().mean()
    blocks = _Blocks(weight, scheme.block or (-1, -1))
    scales = blocks.largest() / FP8_MAX
    scales = torch.where(scales > 0, scales.clamp(min=_TINY), torch.ones_like(scales))
    if options.clip:
        scales = _search(blocks, scales, importance)
    loss = None
    if factor is None:
        codes = blocks.codes(scales)
    else:
        codes, loss = _solve(blocks, scales, factor, options.block_columns)
    reach = known.max_abs.amax() if known is not None else torch.zeros(())
    input_scale = (torch.where(reach > 0, reach, 1.0) / FP8_MAX).float() if scheme.inputs == "static" else None
    stored = Fp8Weight(codes, scales, blocks.block, scheme.inputs, input_scale)
    difference = stored.dense(torch.float32) - weight
    measured = None
    if known is not None:
        measured = decibels(output_energy(weight.t(), known.hessian), output_energy(difference.t(), known.hessian))
    notes = ("no token reached this layer: the scale of its inputs is a guess",) if input_scale is not None and known is None else ()
    damp = None if factor is None else round(factor.damp, 6)
    return QuantizedWeight(stored, decibels(energy(weight), energy(difference)), measured, loss, damp, notes)


class _Blocks:
    """A weight seen as blocks (rows, columns) of outputs and inputs, -1 meaning all; those at the edges are filled up with zeros."""

    def __init__(self, weight: torch.Tensor, block: tuple[int, int]) -> None:
        self.weight, self.block = weight, block
        self.size = [extent if size == -1 else size for size, extent in zip(block, weight.shape, strict=True)]
        self._grid = [-(-extent // size) for size, extent in zip(self.size, weight.shape, strict=True)]

    def largest(self) -> torch.Tensor:
        """Largest magnitude of each block."""
        return self._split(self.weight.abs()).amax((1, 3))

    def codes(self, scales: torch.Tensor) -> torch.Tensor:
        """float8 [N, K], rounded to nearest even, beyond 448 cut."""
        return (self.weight / self.spread(scales)).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)

    def spread(self, scales: torch.Tensor) -> torch.Tensor:
        """Each block's scale at all of its weights; shapes that broadcast where that is enough."""
        rows, columns = (size != extent and size != 1 for size, extent in zip(self.size, self.weight.shape, strict=True))
        if rows:
            scales = scales.repeat_interleave(self.size[0], 0)[: self.weight.shape[0]]
        if columns:
            scales = scales.repeat_interleave(self.size[1], 1)[:, : self.weight.shape[1]]
        return scales

    def _split(self, values: torch.Tensor) -> torch.Tensor:
        pads = [count * size - extent for count, size, extent in zip(self._grid, self.size, values.shape, strict=True)]
        padded = torch.nn.functional.pad(values, (0, pads[1], 0, pads[0])) if any(pads) else values
        return padded.reshape(self._grid[0], self.size[0], self._grid[1], self.size[1])


def _solve(blocks: _Blocks, scales: torch.Tensor, factor: HessianFactor, block_columns: int) -> tuple[torch.Tensor, float]:
    """float8 [N, K] that GPTQ chooses, and its loss."""
    rows, columns = blocks.size
    num_outputs, num_inputs = blocks.weight.shape
    steps = scales.repeat_interleave(rows, 0)[:num_outputs].t().contiguous()  # [blocks of inputs, N]
    group_of = (factor.order // columns).numpy()
    codes = torch.empty(num_outputs, num_inputs, dtype=torch.float8_e4m3fn)

    def solve_outputs(outputs: slice) -> float:
        weight, own = blocks.weight[outputs].t()[factor.order].contiguous(), steps[:, outputs].contiguous()

        def choose(start: int, stop: int) -> torch.Tensor:
            errors = torch.empty_like(weight[start:stop])
            upper = factor.upper[start:stop, start:stop].contiguous()
            solve_fp8_block(weight[start:stop].numpy(), upper.numpy(), group_of[start:stop], own.numpy(), errors.numpy())
            return errors

        loss = solve_in_order(weight, factor, block_columns, choose)
        numbers = torch.empty_like(weight)
        numbers[factor.order] = weight / own[factor.order // columns]
        codes[outputs] = numbers.t().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return loss

    return codes, sum(map_slices(solve_outputs, output_slices(num_inputs, num_outputs)))


def _search(blocks: _Blocks, plain: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """For each block the scale, of those tried, with the smallest squared error; importance [K] weights the inputs."""
    scales = torch.stack([plain * ratio for ratio in SCALE_RATIOS])
    shares = torch.ones(blocks.weight.shape[1]) if importance is None else importance.float()
    errors = torch.zeros(scales.shape, dtype=torch.float64)
    fp8_errors(blocks.weight.contiguous().numpy(), shares.numpy(), scales.numpy(), *blocks.size, errors.numpy())
    return scales.gather(0, errors.argmin(0)[None])[0]
