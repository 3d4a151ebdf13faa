"""Steps, zero points and the search for the clipping of groups."""

from __future__ import annotations

import pytest
import torch

from dspark.converters.quantizers.base import SolverOptions
from dspark.converters.quantizers.grid import Grid, choose_grid, clip_ratios
from dspark.kernels.quant_math import group_range, round_to_codes, zero_point
from dspark.runtime.spec.quant import QuantScheme

EIGHT = [-0.75, -0.3, -0.05, 0.0, 0.05, 0.2, 0.3, 0.5]


def steps(values: list[float], bits: int, symmetric: bool, **options: bool) -> tuple[float, float, list[float]]:
    """Step, zero and codes of one group."""
    grid = Grid(bits, symmetric, torch.float32, clip=options.get("clip", False), legacy=options.get("legacy", False))
    group = torch.tensor(values)[None, :, None]
    scale, zero = grid.steps(group)
    return float(scale), float(zero), round_to_codes(group, scale[:, None], zero[:, None], bits).flatten().tolist()


def test_symmetric_and_asymmetric_by_hand() -> None:
    assert steps(EIGHT, 4, True) == (pytest.approx(0.1), 8, [0, 5, 8, 8, 8, 10, 11, 13])
    assert steps(EIGHT, 4, False) == (pytest.approx(1.25 / 15), 9, [0, 5, 8, 9, 10, 11, 13, 15])
    assert steps([1.5, -0.5, 0.5, 0.0], 2, True) == (1.0, 2, [3, 2, 2, 2])  # halves go to the even number
    assert steps([3.5, -3.5, 1.0, 0.0], 3, True) == (1.0, 4, [7, 0, 5, 4])


def test_a_group_without_negative_weights_is_mirrored_all_the_same() -> None:
    """AutoGPTQ takes the step .1 with zero 8, so that everything above .7 is cut to half its size."""
    values = [0.2, 0.4, 0.9, 1.5]
    assert steps(values, 4, True) == (pytest.approx(0.2), 8, [9, 10, 12, 15])
    assert steps(values, 4, True, legacy=True) == (pytest.approx(0.1), 8, [10, 12, 15, 15])
    assert steps([-v for v in values], 4, True, legacy=True)[0] == pytest.approx(0.2)


def test_ranges_hold_zero_and_empty_groups_have_one() -> None:
    low, high = group_range(torch.tensor([0.5, -2.0, 0.0]), torch.tensor([3.0, -1.0, 0.0]), False)
    assert low.tolist() == [0.0, -2.0, -1.0] and high.tolist() == [3.0, 0.0, 1.0]
    low, high = group_range(torch.tensor([0.5, -2.0]), torch.tensor([3.0, -1.0]), True)
    assert low.tolist() == [-3.0, -2.0] and high.tolist() == [3.0, 2.0]
    assert zero_point(torch.tensor([-0.75, 0.0]), torch.tensor([0.1, 0.1]), 4, False).tolist() == [8.0, 0.0]


def test_ratios_begin_with_none_and_reach_further_with_fewer_bits() -> None:
    assert all(clip_ratios(bits)[0] == 1.0 and len(set(clip_ratios(bits))) == len(clip_ratios(bits)) for bits in range(2, 9))
    assert [min(clip_ratios(bits)) for bits in (2, 3, 4, 5, 8)] == [0.3, 0.44, 0.58, 0.9, 0.9]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_search_finds_the_best_candidate(bits: int, symmetric: bool, weighted: bool) -> None:
    """The compiled loop against every candidate measured one after the other; tails of 64 outputs, weights of either sign."""
    generator = torch.Generator().manual_seed(bits)
    groups = torch.randn(3, 32, 77, generator=generator) ** 3
    groups[0, :, 5] = groups[0, :, 5].abs()
    importance = torch.rand(3, 32, generator=generator) ** 4 if weighted else None
    grid = Grid(bits, symmetric, torch.float16)
    scale, zero = grid.steps(groups, importance)

    def error(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        codes = round_to_codes(groups, scale[:, None], zero[:, None], bits)
        off = ((codes - zero[:, None]) * scale[:, None] - groups).square()
        return (off if importance is None else off * importance[:, :, None]).sum(1)

    low, high = group_range(groups.amin(1), groups.amax(1), symmetric)
    every = torch.stack([error(*candidate) for candidate in zip(*grid._candidates(low, high, clip_ratios(bits)), strict=True)])
    assert torch.allclose(error(scale, zero), every.amin(0), rtol=1e-5)
    assert bool((error(scale, zero) <= every[0] * (1 + 1e-6)).all()), "never worse than going without"
    assert torch.equal(scale, scale.half().float())


def test_inputs_that_matter_more_are_clipped_less() -> None:
    group = torch.tensor([1.0, *[0.3 * (i / 15 - 1) for i in range(31)]])[None, :, None]
    grid = Grid(3, True, torch.float32)
    plain, _ = grid.steps(group)
    heavy, _ = grid.steps(group, torch.tensor([[1000.0, *[1.0] * 31]]))
    light, _ = grid.steps(group, torch.tensor([[0.001, *[1.0] * 31]]))
    assert float(light) <= float(plain) < float(heavy)


@pytest.mark.parametrize(
    ("size", "storage", "legacy", "dtype"),
    [
        (1.0, "wna16", False, torch.float16),
        (1e-6, "wna16", False, torch.float32),
        (1e6, "wna16", False, torch.float32),
        (1.0, "wna16", True, torch.float32),
        (1.0, "int8", False, torch.float32),
    ],
)
def test_steps_are_stored_where_they_fit(size: float, storage: str, legacy: bool, dtype: torch.dtype) -> None:
    """A step below float16's normal range has a digit or two, or is zero and divides by zero (the specification's section 9.2)."""
    weight = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) * size
    found = choose_grid(weight, QuantScheme("test", 8, storage=storage), 32, SolverOptions(legacy=legacy))
    assert found.step_dtype == dtype


def test_a_step_that_grows_beyond_float16_is_held() -> None:
    """Weights grow while a solver moves errors to them; a step that becomes infinite would erase its group."""
    scale, _ = Grid(2, True, torch.float16, clip=False).steps(torch.full((1, 4, 1), 1e6))
    assert float(scale) == torch.finfo(torch.float16).max
    scale, _ = Grid(2, True, torch.float16, clip=False).steps(torch.full((1, 4, 1), 1e-9))
    assert float(scale) == torch.finfo(torch.float16).tiny
