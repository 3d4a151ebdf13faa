"""The numbers that integer codes can stand for: steps and zero points of every group, and the search for their clipping.

The largest weight of a group sets its step; giving up a little of it makes the step finer for all others. Each group tries a few ratios and
keeps the one with the smallest squared error, each input weighing as much as its second moment where that is known. The ratio 1 (nothing
is clipped) is among them, so the search is never worse than going without. A step is rounded to the type in which it is stored before
anything is measured with it: the codes then belong to the step that the kernels use.

Weights stand as [K, N] here, inputs first, as their codes are stored. K inputs, N outputs, G groups of g inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark.converters.quantizers.base import SolverOptions
from dspark.kernels.quant_math import group_range, zero_point
from dspark.runtime.spec.quant import QuantScheme

LEGACY_RATIOS = tuple(1 - step / 100 for step in range(80))
LEGACY_EXPONENT = 2.4
"""AutoGPTQ's search: unweighted, 80 ratios, this power of the error"""
_SMALLEST_RATIO = {2: 0.3, 3: 0.44, 4: 0.58}
_RATIO_STEP = 0.02
_RATIOS_8_BIT = (1.0, 0.98, 0.95, 0.9)
_BOTH_ZEROS_BITS = 3
"""With so few codes the zero point's other neighbour is tried as well (GPTQModel does so at 2 bits)."""
_HALF = torch.finfo(torch.float16)
_HALF_ROOM = 16.0  # how much a step may grow while a solver moves errors to later inputs


def clip_ratios(bits: int) -> tuple[float, ...]:
    """Ratios that the search tries: the fewer the codes, the more clipping pays."""
    smallest = _SMALLEST_RATIO.get(bits)
    if smallest is None:
        return _RATIOS_8_BIT
    return tuple(round(1 - _RATIO_STEP * step, 2) for step in range(round((1 - smallest) / _RATIO_STEP) + 1))


@dataclass(frozen=True)
class Grid:
    """How steps are chosen. step_dtype: in which they are stored. The rest as in QuantScheme and SolverOptions."""

    bits: int
    symmetric: bool
    step_dtype: torch.dtype
    clip: bool = True
    legacy: bool = False

    @property
    def max_code(self) -> int:
        return 2**self.bits - 1

    def steps(self, groups: torch.Tensor, importance: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Step and zero point [G, N], in the weights' own type, of contiguous groups [G, g, N]. importance [G, g]: None is 1 for all."""
        low, high = group_range(groups.amin(1), groups.amax(1), self.symmetric, mirror_always=not self.legacy)
        ratios = (LEGACY_RATIOS if self.legacy else clip_ratios(self.bits)) if self.clip else (1.0,)
        scales, zeros = self._candidates(low, high, ratios)
        if len(scales) == 1:
            return scales[0], zeros[0]
        from dspark.converters.quantizers.loops import best_candidates, magic

        if importance is None or self.legacy:
            importance = torch.ones(groups.shape[:2])
        best = torch.zeros(low.shape, dtype=torch.int64)
        number = groups.numpy().dtype.type
        best_candidates(
            groups.numpy(),
            importance.to(groups.dtype).contiguous().numpy(),
            scales.numpy(),
            zeros.numpy(),
            number(self.max_code),
            number(LEGACY_EXPONENT if self.legacy else 2),
            magic(groups.numpy().dtype),
            best.numpy(),
        )
        return scales.gather(0, best[None])[0], zeros.gather(0, best[None])[0]

    def _candidates(self, low: torch.Tensor, high: torch.Tensor, ratios: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Steps and zero points [P, G, N] of ranges [G, N], clipped by each of the ratios; the first is the plain one."""
        share = torch.tensor(ratios, dtype=low.dtype)[:, None, None]
        scales = (share * high - share * low) / self.max_code
        if self.step_dtype == torch.float16:
            scales = scales.clamp_(_HALF.tiny, _HALF.max).half().to(low.dtype)
        elif not self.legacy:
            scales = scales.clamp_(min=torch.finfo(torch.float32).tiny).float().to(low.dtype)
        zeros = zero_point(share * low, scales, self.bits, self.symmetric)
        if self.symmetric or self.legacy or not self.clip or self.bits > _BOTH_ZEROS_BITS:
            return scales, zeros
        exact = -share * low / scales
        other = torch.where(zeros < exact, exact.ceil(), exact.floor()).clamp_(0, self.max_code)
        return torch.cat([scales, scales]), torch.cat([zeros, other])


def choose_grid(weight: torch.Tensor, scheme: QuantScheme, group_size: int, options: SolverOptions) -> Grid:
    """The grid of a weight [K, N]. Steps are stored in float16, or in float32 where one would leave float16's normal range.

    A subnormal step has few digits, and a step of zero divides by zero. Those of "int8" storage and of AutoGPTQ's rules are float32.
    """
    groups = weight.reshape(-1, group_size, weight.shape[1])
    low, high = group_range(groups.amin(1), groups.amax(1), scheme.symmetric)
    scale = (high - low) / (2**scheme.weight_bits - 1)
    smallest = min(clip_ratios(scheme.weight_bits)) if options.clip else 1.0
    fits = bool(scale.min() * smallest >= _HALF.tiny) and bool(scale.max() <= _HALF.max / _HALF_ROOM)
    half = fits and scheme.storage == "wna16" and not options.legacy
    return Grid(scheme.weight_bits, scheme.symmetric, torch.float16 if half else torch.float32, options.clip, options.legacy)
