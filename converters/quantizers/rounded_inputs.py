"""Linears whose inputs are rounded when they run: the weights that suit rounded inputs best, and what is lost to the rounding.

An input that is rounded is a little of itself and noise: q_k = a_k x_k + n_k, with a_k = E[q_k x_k] / E[x_k^2] (1 but where an input is
often rounded to zero) and noise of variance v_k that is related to nothing else (Bussgang's decomposition, each input by itself). With H
the second moments of x, those of q are A H A + V, and the weights with the smallest error of the outputs are W H A (A H A + V)^-1: noise is
let in less by inputs whose part others can play. What is chosen for them is then held against the moments of q.

a and v are measured on the tokens that the statistics keep. K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from dspark.converters.quantizers.factor import MAX_WIDE_INPUTS
from dspark.converters.quantizers.measure import decibels, output_energy
from dspark.converters.quantizers.statistics import LayerStatistics
from dspark.kernels.quant_math import FP8_MAX, quantize_tokens, round_tokens_to_fp8
from dspark.runtime.spec.quant import QuantScheme

MIN_TOKENS_PER_INPUT = 8
"""With fewer, directions that calibration hardly met would look as if nothing but noise came from there, and their weights would vanish."""
_DAMP = 1e-6  # of the mean moment; the noise itself damps more than that


@dataclass(frozen=True, eq=False)
class RoundedInputs:
    """statistics: of the rounded inputs. exact float32 [K, K]: Hessian of the inputs. gain, noise [K]: a, and 2 v as in a Hessian."""

    statistics: LayerStatistics
    exact: torch.Tensor
    gain: torch.Tensor
    noise: torch.Tensor

    @cached_property
    def change(self) -> torch.Tensor | None:
        """What takes a weight [N, K] to the best one: float32 [K, K]; None for too few tokens, or moments that cannot be factorized."""
        if self.statistics.num_tokens < MIN_TOKENS_PER_INPUT * len(self.gain):
            return None
        return _change(self.statistics.hessian, self.gain, self.noise, self.exact)

    def best_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight [N, K] for rounded inputs; the given one where that is not known."""
        return weight if self.change is None else weight @ self.change

    def output_decibels(self, values: torch.Tensor, weight: torch.Tensor) -> float | None:
        """Signal to noise of the outputs, see `output_noise`."""
        return decibels(output_energy(weight.t().contiguous(), self.exact), self.output_noise(values, weight))

    def output_noise(self, values: torch.Tensor, weight: torch.Tensor) -> float:
        """Twice the squared error of a token's outputs when values [N, K] stand for the weight [N, K], and the inputs are rounded."""
        own = float((values.square().sum(0, dtype=torch.float64) * self.noise).sum())
        return own + output_energy((values * self.gain - weight).t().contiguous(), self.exact)


def rounded_inputs(statistics: LayerStatistics, scheme: QuantScheme) -> RoundedInputs | None:
    """Kept in `statistics.factors`. None where the scheme takes inputs as they are, or no token was kept."""
    if (scheme.storage != "int8" and scheme.inputs is None) or statistics.tokens is None or not len(statistics.tokens):
        return None
    key = ("rounded", scheme.storage, scheme.inputs)
    if key not in statistics.factors:
        statistics.factors[key] = _measure(statistics, rounded_tokens(statistics, scheme))
    found: RoundedInputs = statistics.factors[key]
    return found


def rounded_tokens(statistics: LayerStatistics, scheme: QuantScheme) -> torch.Tensor:
    """The tokens [S, K] that the statistics keep, as the scheme's kernels round them."""
    assert statistics.tokens is not None
    if scheme.storage == "int8":
        codes, scale = quantize_tokens(statistics.tokens)
        return codes.float() * scale
    return round_tokens_to_fp8(statistics.tokens, statistics.max_abs.amax() / FP8_MAX if scheme.inputs == "static" else None)


def _measure(statistics: LayerStatistics, rounded: torch.Tensor) -> RoundedInputs:
    tokens, exact = statistics.tokens, statistics.hessian
    assert tokens is not None
    power = tokens.square().mean(0)
    gain = torch.where(power > 0, (tokens * rounded).mean(0) / power, 1.0)
    noise = 2 * (rounded - gain * tokens).square().mean(0)
    moments = exact * torch.outer(gain, gain)
    moments.diagonal().add_(noise)
    seen = replace(statistics, hessian=moments, tokens=rounded, factors={})
    return RoundedInputs(seen, exact, gain, noise)


def _change(moments: torch.Tensor, gain: torch.Tensor, noise: torch.Tensor, exact: torch.Tensor) -> torch.Tensor | None:
    """H A M^-1 with M the moments A H A + V, damped towards leaving a weight as it is: 1 - ((A - 1) H A + V) (M + damping)^-1."""
    wide = moments.to(torch.float64 if len(moments) <= MAX_WIDE_INPUTS else torch.float32, copy=True)
    wide.diagonal().add_(_DAMP * wide.diagonal().mean())
    lower, info = torch.linalg.cholesky_ex(wide)
    if int(info) or not bool(lower.diagonal().isfinite().all()):
        return None
    off = ((gain - 1)[:, None] * exact * gain).to(lower.dtype)
    off.diagonal().add_(noise)
    change = torch.cholesky_solve(off.t(), lower).t().neg_()
    change.diagonal().add_(1)
    return change.float().contiguous()
