"""Moving factors: by hand, exact in the stored dtype, and never in place."""

from __future__ import annotations

import pytest
import torch

from dspark.converters.scaling.fold import fold_group, fold_inputs, fold_norm, fold_outputs, storable_scales
from dspark.converters.scaling.groups import NORM_MLP, UP_DOWN, VALUE_OUT, ScalingGroup

NORM = ScalingGroup(NORM_MLP, "norm", ("gate", "up"), "gate", 2)


def test_folding_by_hand() -> None:
    scales = torch.tensor([2.0, 0.5])
    assert fold_norm(torch.tensor([3.0, 1.0]), scales).tolist() == [1.5, 2.0]
    assert fold_norm(torch.tensor([0.5, -0.25]), scales, offset=True).tolist() == [-0.25, 0.5]
    assert fold_outputs(torch.tensor([[2.0, 4.0], [1.0, 3.0]]), scales).tolist() == [[1.0, 2.0], [2.0, 6.0]]
    assert fold_outputs(torch.tensor([2.0, 4.0]), scales).tolist() == [1.0, 8.0]
    assert fold_inputs(torch.tensor([[2.0, 4.0]]), scales).tolist() == [[4.0, 2.0]]


def test_a_group_changes_its_modules_and_no_input() -> None:
    """AutoAWQ's own copy of a weight was the weight itself (an alias): its search then read what it had scaled."""
    tensors = {name: torch.rand(2, 2) + 1 for name in ("gate.weight", "up.weight", "other.weight")} | {"norm.weight": torch.rand(2) + 1}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    changed = fold_group(tensors, NORM, torch.tensor([2.0, 0.5]))
    assert set(changed) == {"norm.weight", "gate.weight", "up.weight"}
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    assert not any(torch.equal(changed[name], before[name]) for name in changed)


def test_a_linear_and_its_bias_are_divided_by_output() -> None:
    group = ScalingGroup(UP_DOWN, "up", ("down",), "down", 2)
    tensors = {"up.weight": torch.full((2, 3), 6.0), "up.bias": torch.tensor([6.0, 6.0]), "down.weight": torch.ones(1, 2)}
    changed = fold_group(tensors, group, torch.tensor([2.0, 3.0]))
    assert changed["up.weight"].tolist() == [[3.0] * 3, [2.0] * 3] and changed["up.bias"].tolist() == [3.0, 2.0]
    assert changed["down.weight"].tolist() == [[2.0, 3.0]]
    del tensors["up.bias"]
    assert "up.bias" not in fold_group(tensors, group, torch.tensor([2.0, 3.0]))


@pytest.mark.parametrize(
    ("scales", "what"),
    [([1.0], "shape"), ([1.0, 0.0], "above 0"), ([1.0, -2.0], "above 0"), ([1.0, float("nan")], "finite"), ([float("inf"), 1.0], "finite")],
)
def test_scales_that_cannot_be_moved_are_refused(scales: list[float], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        fold_group({}, NORM, torch.tensor(scales))


def test_different_factors_for_one_head_of_values_are_refused() -> None:
    group = ScalingGroup(VALUE_OUT, "v", ("o",), "o", 4, repeats=2, head_dim=2)
    with pytest.raises(ValueError, match="differ between query heads"):
        fold_group({}, group, torch.tensor([1.0, 2.0, 1.0, 3.0]))


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_in_16_bits_takes_storable_scales_exactly(offset: bool, dtype: torch.dtype) -> None:
    """Rounding the folded norm to 16 bits would be an error of its own, as large as that of 8-bit weights."""
    generator = torch.Generator().manual_seed(0)
    group = ScalingGroup(NORM_MLP, "norm", ("linear",), "linear", 64, norm_offset=offset)
    norm = (torch.randn(64, generator=generator) * 0.3 + (0.0 if offset else 1.0)).to(dtype).float()
    wanted = torch.exp(torch.randn(64, generator=generator))
    scales = storable_scales(group, norm, wanted, dtype)
    assert float((scales / wanted - 1).abs().max()) < 0.02
    tensors = {"norm.weight": norm, "linear.weight": torch.ones(1, 64)}
    changed = fold_group(tensors, group, scales)
    stored = changed["norm.weight"].to(dtype).float()
    factor = (stored + 1 if offset else stored) * changed["linear.weight"][0]
    torch.testing.assert_close(factor, norm + 1 if offset else norm, rtol=1e-6, atol=1e-7)
    assert float((fold_norm(norm, wanted, offset).to(dtype).float() - fold_norm(norm, wanted, offset)).abs().max()) > 1e-4


def test_storable_scales_of_a_dead_channel_are_as_wanted() -> None:
    """A norm weight of zero, and one that becomes zero in float16, say nothing about the factor."""
    group = ScalingGroup(NORM_MLP, "norm", ("linear",), "linear", 2)
    scales = torch.tensor([3.0, 1e6])
    assert storable_scales(group, torch.tensor([0.0, 1e-6]), scales, torch.float16).tolist() == [3.0, 1e6]
    other = ScalingGroup(UP_DOWN, "up", ("down",), "down", 2)
    assert storable_scales(other, torch.ones(2, 2), scales, torch.float16) is scales
