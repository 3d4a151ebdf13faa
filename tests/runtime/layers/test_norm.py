"""Norms whose factor is 1 + weight, and the step between two blocks."""

from __future__ import annotations

import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from dspark.kernels.ops import KernelFacts, Kernels
from dspark.runtime.layers.norm import ResidualStep, load_norm

EPS = 1e-6


class OneTensor:
    """A WeightSource of a single tensor."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __contains__(self, name: str) -> bool:
        return name == "norm.weight"

    def take(self, name: str) -> torch.Tensor:
        assert name == "norm.weight"
        return self.weight


def kernels(choice: str, dtype: torch.dtype = torch.bfloat16) -> Kernels:
    return Kernels(KernelFacts("cpu", dtype, 16, 4, 2, 16), choice)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def test_an_offset_norm_gives_the_bits_of_transformers_in_bfloat16() -> None:
    """1 + weight in bfloat16 keeps 8 bits of the sum: a weight of 0.001 would vanish."""
    weight = (drawn(64) * 0.01).bfloat16()
    x = drawn(9, 64).bfloat16()
    theirs = Gemma2RMSNorm(64, EPS).bfloat16()
    theirs.weight.data.copy_(weight)
    factor = load_norm("norm", OneTensor(weight), offset=True)
    assert factor.dtype == torch.float32
    assert torch.equal(kernels("reference").rms_norm(x, factor, EPS), theirs(x))
    close = kernels("auto").rms_norm(x, factor, EPS)
    torch.testing.assert_close(close, theirs(x), rtol=2**-7, atol=0)  # another order of summation: the last bit, at most
    rounded = (1 + weight).bfloat16()
    assert not torch.equal(kernels("reference").rms_norm(x, rounded, EPS), theirs(x))


def test_a_plain_norm_gives_the_bits_of_transformers_in_bfloat16() -> None:
    weight, x = (1 + drawn(64) * 0.1).bfloat16(), drawn(9, 64).bfloat16()
    theirs = Olmo2RMSNorm(64, EPS).bfloat16()
    theirs.weight.data.copy_(weight)
    factor = load_norm("norm", OneTensor(weight), offset=False)
    assert torch.equal(kernels("reference").rms_norm(x, factor, EPS), theirs(x))


def test_the_step_between_blocks_on_paper() -> None:
    """Result [3, 4], rms sqrt(12.5); stream [1, 1]."""
    ops = kernels("reference", torch.float32)
    x, stream = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 1.0]])
    twice = torch.tensor([2.0, 2.0])
    normed = x / 12.5**0.5 * 2

    def check(step: ResidualStep, want_stream: torch.Tensor, want_next: torch.Tensor) -> None:
        hidden, residual = step(x.clone(), stream.clone())
        torch.testing.assert_close(residual, want_stream)
        torch.testing.assert_close(hidden, want_next)

    def rms(value: torch.Tensor) -> torch.Tensor:
        return value / value.pow(2).mean().sqrt()

    check(ResidualStep(None, 1.0, twice, 0.0, ops), stream + x, rms(stream + x) * 2)
    check(ResidualStep(None, 0.5, twice, 0.0, ops), stream + x / 2, rms(stream + x / 2) * 2)
    check(ResidualStep(twice, 1.0, None, 0.0, ops), stream + normed, stream + normed)
    check(ResidualStep(twice, 1.0, twice, 0.0, ops), stream + normed, rms(stream + normed) * 2)
