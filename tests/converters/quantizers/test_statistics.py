"""Statistics of a layer's inputs: against plain sums in float64, by hand, and what is refused."""

from __future__ import annotations

import pytest
import torch

from dspark.converters.quantizers.statistics import CHUNK_TOKENS, MIN_STRIP_ROWS, SAMPLED_TOKENS, StatisticsAccumulator
from dspark.runtime.spec.errors import InputError


def inputs(tokens: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(tokens, width, generator=generator) * torch.rand(width, generator=generator) * 3).to(dtype)


def statistics(*batches: torch.Tensor):
    accumulator = StatisticsAccumulator(batches[0].shape[1])
    for batch in batches:
        accumulator.add(batch)
    return accumulator.finish()


def test_by_hand() -> None:
    found = statistics(torch.tensor([[1.0, -2.0], [3.0, 0.0]]))
    assert found.hessian.tolist() == [[10.0, -2.0], [-2.0, 4.0]]  # 2 / 2 tokens * (1 + 9, -2; -2, 4)
    assert found.mean_abs.tolist() == [2.0, 1.0] and found.max_abs.tolist() == [3.0, 2.0] and found.num_tokens == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, MIN_STRIP_ROWS, MIN_STRIP_ROWS + 1, 200])
@pytest.mark.parametrize("tokens", [3, CHUNK_TOKENS + 5])
def test_sums_are_those_of_float64(dtype: torch.dtype, width: int, tokens: int) -> None:
    """Strips of the triangle, chunks of tokens and bfloat16 products give what one product of everything gives."""
    batches = [inputs(tokens, width, dtype, seed) for seed in (1, 2)]
    found = statistics(*batches)
    x = torch.cat(batches).double()
    want = 2 / len(x) * x.t() @ x
    assert found.num_tokens == len(x)
    assert float((found.hessian - want).abs().max() / want.abs().max()) < 5e-6
    assert torch.equal(found.hessian, found.hessian.t())
    assert torch.allclose(found.mean_abs.double(), x.abs().mean(0), rtol=1e-5) and torch.equal(found.max_abs.double(), x.abs().amax(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_moments_are_those_of_float64(dtype: torch.dtype) -> None:
    quantized = inputs(500, 70, dtype)
    full = (quantized.float() + inputs(500, 70, torch.float32, 5) * 0.05).to(dtype)
    accumulator = StatisticsAccumulator(70, cross=True)
    accumulator.add(quantized, full)
    found = accumulator.finish()
    want = 2 / 500 * (full.double() - quantized.double()).t() @ quantized.double()
    assert found.cross is not None and float((found.cross - want).abs().max() / found.hessian.abs().max()) < 5e-6


@pytest.mark.parametrize("sizes", [[2100], [700, 1, 699, 700], [40] * 52 + [20]])
def test_tokens_that_are_kept_are_evenly_spread_however_they_come(sizes: list[int]) -> None:
    """2100 tokens: every second one left 1050, so every fourth is kept: 525."""
    x = inputs(2100, 6, torch.bfloat16)
    kept = statistics(*x.split(sizes)).tokens
    assert kept is not None and torch.equal(kept, x[::4].float()) and SAMPLED_TOKENS <= len(kept) <= 2 * SAMPLED_TOKENS
    scaled = statistics(*x.split(sizes)).scaled(torch.arange(1.0, 7.0)).tokens
    assert scaled is not None and torch.equal(scaled, kept / torch.arange(1.0, 7.0))


def test_bfloat16_products_leave_the_setting_as_it_was() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    statistics(inputs(10, 8, torch.bfloat16))
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_scaled_statistics_are_those_of_the_scaled_inputs() -> None:
    x, scale = inputs(100, 20, torch.float32), torch.rand(20) + 0.5
    scaled, want = statistics(x).scaled(scale), statistics(x / scale)
    for name in ("hessian", "mean_abs", "max_abs"):
        assert torch.allclose(getattr(scaled, name), getattr(want, name), rtol=1e-4, atol=1e-6), name
    assert scaled.num_tokens == 100


def test_merged_statistics_are_those_of_all_tokens() -> None:
    first, second = inputs(30, 20, torch.float32, 1), inputs(70, 20, torch.float32, 2)
    merged, want = statistics(first).merge(statistics(second)), statistics(first, second)
    for name in ("hessian", "mean_abs", "max_abs"):
        assert torch.allclose(getattr(merged, name), getattr(want, name), rtol=1e-4, atol=1e-6), name
    empty = StatisticsAccumulator(20).finish()
    assert merged.merge(empty).num_tokens == 100 and torch.equal(merged.merge(empty).hessian, merged.hessian)
    with pytest.raises(ValueError, match="20 and 8 inputs"):
        merged.merge(StatisticsAccumulator(8).finish())


def test_no_tokens_are_zeros() -> None:
    """An expert that no token reached."""
    found = StatisticsAccumulator(12).finish()
    assert found.num_tokens == 0 and not found.hessian.any() and found.cross is None
    accumulator = StatisticsAccumulator(12)
    accumulator.add(torch.empty(0, 12))
    assert accumulator.finish().num_tokens == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_inputs_that_are_not_finite_are_refused(value: float) -> None:
    """A float16 model that overflows would poison every code of the layer."""
    x = inputs(10, 8, torch.float32)
    x[3, 4] = value
    with pytest.raises(InputError, match="activations have values that are not finite"):
        statistics(x)
    accumulator = StatisticsAccumulator(8, cross=True)
    with pytest.raises(InputError, match="not finite"):
        accumulator.add(inputs(10, 8, torch.float32), x)


def test_sums_beyond_float32_are_refused() -> None:
    with pytest.raises(InputError, match="second moments"):
        statistics(torch.full((4, 2), 1e25))


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"wanted \[tokens, 8\]"):
        StatisticsAccumulator(8).add(torch.zeros(3, 9))
    with pytest.raises(ValueError, match="both models"):
        StatisticsAccumulator(8).add(torch.zeros(3, 8), torch.zeros(3, 8))
    with pytest.raises(ValueError, match="both models"):
        StatisticsAccumulator(8, cross=True).add(torch.zeros(3, 8))
