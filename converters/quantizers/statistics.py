"""What calibration tells a solver about the inputs of a linear layer: their second moments and their magnitudes.

K inputs, T tokens. Products are summed in float32. Inputs in bfloat16 have products that float32 holds exactly, so oneDNN may compute them
with its bfloat16 units and lose nothing; only the upper triangle of the symmetric sum is computed, in strips of rows. Both together are
three times faster than a float32 product (`benchmarks/solvers.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dspark.converters.quantizers.loops import add_magnitudes
from dspark.runtime.spec.errors import InputError

CHUNK_TOKENS = 2048
"""Tokens that are widened and multiplied at a time: their float32 copy stays in the cache."""
STRIPS = 3
"""Strips of rows of the upper triangle; more of them save arithmetic and make the products thinner."""
MIN_STRIP_ROWS = 64
SAMPLED_TOKENS = 512
"""Tokens that are kept whole, at least, of as many or more; at most twice as many. Evenly spread."""


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """Statistics of the inputs x of one linear, shared by the linears that read the same inputs (q, k, v; gate, up).

    hessian float32 [K, K]: (2 / n) * sum x x^T over n tokens. mean_abs, max_abs float32 [K]: of |x|. num_tokens: n, 0 for an expert that no
    token reached (all else is then zero). cross float32 [K, K] or None: (2 / n) * sum (x_full - x) x^T, where x_full is the input in the
    model that is not quantized; for GPTAQ. tokens float32 [S, K]: some of the inputs, evenly spread. factors: solvers keep here what they
    derive from the Hessian, so that sharing the object shares the work; nobody else looks into it.
    """

    hessian: torch.Tensor
    mean_abs: torch.Tensor
    max_abs: torch.Tensor
    num_tokens: int
    cross: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    factors: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def num_inputs(self) -> int:
        return int(self.mean_abs.shape[0])

    def scaled(self, scale: torch.Tensor) -> LayerStatistics:
        """The statistics of x / scale [K], as after folding the scale into whatever makes x. The scale is positive."""
        pairs = torch.outer(scale, scale).float()
        return LayerStatistics(
            self.hessian / pairs,
            self.mean_abs / scale,
            self.max_abs / scale,
            self.num_tokens,
            None if self.cross is None else self.cross / pairs,
            None if self.tokens is None else self.tokens / scale,
        )

    def merge(self, other: LayerStatistics) -> LayerStatistics:
        """The statistics of both sets of tokens together. The cross moments survive only where both have them."""
        if other.num_inputs != self.num_inputs:
            raise ValueError(f"statistics of {self.num_inputs} and {other.num_inputs} inputs do not belong together")
        total = self.num_tokens + other.num_tokens
        if total == 0:
            return replace(self, factors={})
        own, theirs = self.num_tokens / total, other.num_tokens / total
        cross = None if self.cross is None or other.cross is None else self.cross * own + other.cross * theirs
        tokens = None if self.tokens is None or other.tokens is None else torch.cat([self.tokens, other.tokens])
        return LayerStatistics(
            self.hessian * own + other.hessian * theirs,
            self.mean_abs * own + other.mean_abs * theirs,
            torch.maximum(self.max_abs, other.max_abs),
            total,
            cross,
            tokens,
        )


class StatisticsAccumulator:
    """Adds up inputs, then gives their `LayerStatistics`. cross: `add` is given the full-precision model's inputs too."""

    def __init__(self, num_inputs: int, cross: bool = False) -> None:
        self.num_inputs = num_inputs
        self.num_tokens = 0
        rows = max(MIN_STRIP_ROWS, -(-num_inputs // STRIPS))
        self._strips = [(start, torch.zeros(min(rows, num_inputs - start), num_inputs - start)) for start in range(0, num_inputs, rows)]
        self._cross = torch.zeros(num_inputs, num_inputs) if cross else None
        self._sum_abs = torch.zeros(num_inputs, dtype=torch.float64)
        self._max_abs = torch.zeros(num_inputs)
        self._wide = torch.empty(CHUNK_TOKENS, num_inputs)
        self._kept = torch.empty(0, num_inputs)
        self._stride = 1

    def add(self, x: torch.Tensor, full: torch.Tensor | None = None) -> None:
        """Add inputs [T, K] of any float dtype, on any device; padding must be left out.

        full [T, K]: the same tokens in the full-precision model. Raises InputError for a value that is not finite; ValueError for another
        width, or when `full` and `cross` do not go together.
        """
        if x.dim() != 2 or x.shape[1] != self.num_inputs:
            raise ValueError(f"inputs have shape {list(x.shape)}, wanted [tokens, {self.num_inputs}]")
        if (full is None) != (self._cross is None) or (full is not None and full.shape != x.shape):
            raise ValueError("cross moments need the inputs of both models, with the same shape")
        pieces = [None] * len(x) if full is None else full.split(CHUNK_TOKENS)
        exact = x.dtype == torch.bfloat16 and (full is None or full.dtype == torch.bfloat16)
        with _bfloat16_products() if exact else nullcontext():
            for chunk, full_chunk in zip(x.split(CHUNK_TOKENS), pieces, strict=False):
                wide = self._wide[: len(chunk)].copy_(chunk)
                self._add_chunk(wide, None if full_chunk is None else full_chunk.to("cpu", torch.float32))
        self._keep(x)
        self.num_tokens += len(x)

    def _keep(self, x: torch.Tensor) -> None:
        """Every stride-th token of all; of more than twice SAMPLED_TOKENS every second one goes on being kept."""
        self._kept = torch.cat([self._kept, x[-self.num_tokens % self._stride :: self._stride].to("cpu", torch.float32)])
        while len(self._kept) > 2 * SAMPLED_TOKENS:
            self._kept, self._stride = self._kept[::2], 2 * self._stride

    def _add_chunk(self, chunk: torch.Tensor, full: torch.Tensor | None) -> None:
        sums = torch.zeros(self.num_inputs)
        add_magnitudes(chunk.numpy(), sums.numpy(), self._max_abs.numpy())
        if not bool(sums.isfinite().all()) or (full is not None and not bool(full.isfinite().all())):
            raise InputError("activations have values that are not finite", "calibrate in bfloat16 or float32: type --dtype bfloat16")
        self._sum_abs += sums
        for start, strip in self._strips:
            strip.addmm_(chunk[:, start : start + len(strip)].t(), chunk[:, start:])
        if self._cross is not None and full is not None:
            self._cross.addmm_(full.t(), chunk)

    def finish(self) -> LayerStatistics:
        """The statistics of everything added. Raises InputError when a sum has left float32's range."""
        count = max(self.num_tokens, 1)
        upper = torch.zeros(self.num_inputs, self.num_inputs)
        for start, strip in self._strips:
            upper[start : start + len(strip), start:] = strip * (2 / count)
        hessian = upper.triu_() + upper.triu(1).t()
        cross = None if self._cross is None else self._cross * (2 / count) - hessian
        if not bool(hessian.isfinite().all()) or (cross is not None and not bool(cross.isfinite().all())):
            raise InputError("the second moments of the activations are not finite", "the model's activations are too large to calibrate")
        mean_abs = (self._sum_abs / count).float()
        return LayerStatistics(hessian, mean_abs, self._max_abs.clone(), self.num_tokens, cross, self._kept.contiguous())


@contextmanager
def _bfloat16_products() -> Iterator[None]:
    """Let oneDNN multiply float32 matrices as bfloat16, summing in float32, where the processor can. For values that bfloat16 holds."""
    matmul: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009 - typeshed does not know it
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
