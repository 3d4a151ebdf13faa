"""Linear layers in plain torch: dense, and quantized with 16-bit activations.

A linear op is made once per layer (`make_*` re-lays the weight) and returns the function that runs it: x [T, K] -> [T, N].
"""

from collections.abc import Callable

import torch

from dspark.kernels.facts import KernelFacts
from dspark.kernels.wna16 import Wna16Weight

LinearFn = Callable[[torch.Tensor], torch.Tensor]


def make_dense_linear(weight: torch.Tensor, bias: torch.Tensor | None, facts: KernelFacts) -> LinearFn:
    """x @ weight [N, K].T + bias [N]."""
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def make_wna16_linear(weight: Wna16Weight, bias: torch.Tensor | None, facts: KernelFacts) -> LinearFn:
    """x @ dequantized weight.T + bias; the weight is rounded once to x's dtype, on every call."""
    return lambda x: torch.nn.functional.linear(x, weight.dense(x.dtype), bias)
