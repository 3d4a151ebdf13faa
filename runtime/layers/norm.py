"""RMS norms around the blocks of a decoder layer, and the step that adds a block's result to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dspark.kernels.ops import InputFormat, Kernels
from dspark.runtime.layers.weights import WeightSource


def load_norm(name: str, weights: WeightSource, offset: bool) -> torch.Tensor:
    """The factor [H] of the norm module `name`: its weight in the run's dtype, or with offset 1 + weight in float32.

    Families with an offset compute (1 + weight) in float32 and round once, after the product; in 16 bits 1 + weight would lose the low
    digits of the weight. The kernels widen any factor to float32, so a float32 one gives the same bits as transformers.
    """
    weight = weights.take(f"{name}.weight")
    return 1.0 + weight.float() if offset else weight


@dataclass
class ResidualStep:
    """What stands between two blocks: (block's result, residual stream) -> (next block's input, new residual stream), all [T, H].

    post_norm: norm of the result. multiplier: factor on it. pre_norm: norm of the next input; without one that is the stream itself.
    inputs: the codes in which the next block takes its input, None for plain numbers; then norm and quantization are one op.
    The stream that goes in may be overwritten.
    """

    post_norm: torch.Tensor | None
    multiplier: float
    pre_norm: torch.Tensor | None
    eps: float
    kernels: Kernels
    inputs: InputFormat | None = None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """The next block's input is codes where `inputs` asks for them: `Rows`."""
        if self.post_norm is not None:
            x = self.kernels.rms_norm(x, self.post_norm, self.eps)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        if self.pre_norm is None:
            residual = residual + x
            return residual, residual
        if self.inputs is not None:
            return self.kernels.add_rms_norm_quantize(x, residual, self.pre_norm, self.eps, self.inputs)
        return self.kernels.add_rms_norm(x, residual, self.pre_norm, self.eps)
