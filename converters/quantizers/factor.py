"""The Cholesky factor of the inverse Hessian that GPTQ works with, made once for all linears that read the same inputs.

With H the damped Hessian in the order of treatment, U is upper triangular and U^T U = H^-1. Reversing rows and columns turns the upper
factor R of H = R R^T into an ordinary Cholesky factor, and U = R^-1: one factorization and one triangular solve, where inverting H first
takes two factorizations and loses digits. The factorization is done in float64, since outlier channels make H nearly singular beside them;
above 8192 inputs in float32, where three more copies of H in float64 would be the largest thing in memory. K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from dspark.converters.quantizers.base import SolverOptions
from dspark.converters.quantizers.measure import all_finite
from dspark.converters.quantizers.statistics import LayerStatistics

DAMP_STEP = 0.01
_MAX_FLOORS = 6
MAX_WIDE_INPUTS = 8192
_FIRST_FLOOR = 1e-6


@dataclass(frozen=True)
class HessianFactor:
    """What GPTQ needs of the Hessian.

    order int64 [K]: inputs in the order of treatment. upper [K, K]: U in that order. damp: the damping, relative to the diagonal's mean.
    added float32 [K]: what was added to the diagonal, in the original order. importance float32 [K]: the diagonal with it, which weights
    the clipping search. dead bool [K]: inputs that were zero throughout. pull [K, K] or None: GPTAQ's P in the order of treatment.
    failures: factorizations that failed before.
    """

    order: torch.Tensor
    upper: torch.Tensor
    damp: float
    added: torch.Tensor
    importance: torch.Tensor
    dead: torch.Tensor
    pull: torch.Tensor | None
    failures: int


def hessian_factor(statistics: LayerStatistics, options: SolverOptions, dtype: torch.dtype = torch.float32) -> HessianFactor | None:
    """The factor for these options, kept in `statistics.factors`; None when no damping makes the Hessian positive definite.

    Raises ValueError when GPTAQ is asked for and the statistics have no cross moments.
    """
    alpha = options.gptaq_alpha
    if alpha is not None and statistics.cross is None:
        raise ValueError("gptaq_alpha needs statistics with cross moments")
    key = (options.act_order, options.damp, options.legacy, dtype)
    if key not in statistics.factors:
        statistics.factors[key] = _factorize(statistics.hessian, options, dtype)
    factor: HessianFactor | None = statistics.factors[key]
    if factor is None or alpha is None:
        return factor
    if (key, alpha) not in statistics.factors:
        assert statistics.cross is not None
        statistics.factors[key, alpha] = replace(factor, pull=_pull(statistics.cross, factor, alpha))
    with_pull: HessianFactor = statistics.factors[key, alpha]
    return with_pull


def _factorize(hessian: torch.Tensor, options: SolverOptions, dtype: torch.dtype) -> HessianFactor | None:
    diagonal = hessian.diagonal().double()
    if not all_finite(hessian):
        return None
    dead = diagonal == 0
    # An input without signal is coupled to nothing. AutoGPTQ gives it the second moment 1, which damps a layer of small inputs by far more.
    filler = 1.0 if options.legacy or bool(dead.all()) else float(diagonal[~dead].mean())
    filled = diagonal.masked_fill(dead, filler)
    order = torch.arange(len(diagonal))
    if options.act_order:
        order = torch.argsort(-(filled if options.legacy else diagonal), stable=True)
    reverse = order.flip(0)
    wide = torch.float64 if len(order) <= MAX_WIDE_INPUTS else torch.float32
    matrix = hessian.index_select(0, reverse).index_select(1, reverse).to(wide)
    result = _damped_cholesky(matrix, filled[reverse], options.damp)
    del matrix
    if result is None:
        return None
    lower, damping, failures = result
    root = lower.to(dtype).flip(0, 1)  # R of H = R R^T
    del lower, result
    upper = torch.linalg.solve_triangular(root, torch.eye(len(root), dtype=dtype), upper=True)
    damped = filled + damping
    return HessianFactor(
        order=order,
        upper=upper,
        damp=damping / float(filled.mean()),
        added=(damped - diagonal).float(),
        importance=damped.float(),
        dead=dead,
        pull=None,
        failures=failures,
    )


def _damped_cholesky(matrix: torch.Tensor, diagonal: torch.Tensor, damp: float) -> tuple[torch.Tensor, float, int] | None:
    """Lower factor of the matrix with `diagonal` and the least damping that works, that damping, and the attempts that failed.

    Damping relative to the mean of the diagonal is raised by DAMP_STEP while it is below 1; then a floor relative to its largest element
    comes on top, ten times larger each time (Frantar et al. 2022 damp once; GPTQModel raises; the floor is llm-compressor's).
    """
    for failures, damping in enumerate(_dampings(damp, float(diagonal.mean()), float(diagonal.abs().max()))):
        matrix.diagonal().copy_(diagonal + damping)
        lower, info = torch.linalg.cholesky_ex(matrix)
        if int(info) == 0 and bool(lower.diagonal().isfinite().all()):
            return lower, damping, failures
    return None


def _dampings(damp: float, mean: float, largest: float) -> Iterator[float]:
    """What to try adding to the diagonal, in order."""
    relative = damp
    yield relative * mean
    while relative + DAMP_STEP < 1:
        relative += DAMP_STEP
        yield relative * mean
    for power in range(_MAX_FLOORS):
        yield relative * mean + largest * _FIRST_FLOOR * 10**power


def _pull(cross: torch.Tensor, factor: HessianFactor, alpha: float) -> torch.Tensor:
    """GPTAQ's P = alpha * triu(D U^T, 1) U (Li et al. 2025), D the cross moments in the order of treatment."""
    moments = cross.index_select(0, factor.order).index_select(1, factor.order).to(factor.upper.dtype)
    return alpha * (torch.triu(moments @ factor.upper.t(), 1) @ factor.upper)
