"""Experts side by side: how they are stacked, that the reference is the plain loop, and that a Triton step never waits for the host."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from expert_cases import KINDS, stacks

from dspark.kernels.experts import ExpertWeights
from dspark.kernels.facts import KernelFacts
from dspark.kernels.ops import Kernels, Wna16Weight
from dspark.kernels.reference.moe import make_grouped_experts, moe_mlp

FACTS = KernelFacts("cpu", torch.float32, head_dim=64, num_heads=4, num_kv_heads=2, block_size=16)


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_comes_out_as_it_went_in(kind: str) -> None:
    made = [KINDS[kind](torch.float32, seed, 64, 96) for seed in range(3)]
    stacked = ExpertWeights(3)
    for index in (2, 0, 1):
        stacked.put(index, made[index])
    for index, weight in enumerate(made):
        found = stacked.expert(index)
        dense = (weight, found) if kind == "dense" else (weight.dense(torch.float32), found.dense(torch.float32))
        assert torch.equal(*dense)
    part = next(iter(stacked.tensors.values()))
    assert part.shape[0] == 3 and part[1].data_ptr() == next(iter(_parts(stacked.expert(1)))).data_ptr(), "experts are views"


def _parts(weight: Any) -> Any:
    return [weight] if isinstance(weight, torch.Tensor) else weight.parts().values()


def test_experts_of_another_kind_are_refused() -> None:
    stacked = ExpertWeights(2)
    stacked.put(0, torch.zeros(4, 8))
    for other in (torch.zeros(4, 9), torch.zeros(4, 8, dtype=torch.float16), KINDS["w4"](torch.float32, 0, 64, 96)):
        with pytest.raises(ValueError, match="expert 1 has"):
            stacked.put(1, other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_plain_loop(kind: str) -> None:
    gate_up, down = stacks(kind, torch.float32, 3, 4, 64, 32)
    kernels = Kernels(FACTS, "reference")

    def linear(weight: Any) -> Any:
        if isinstance(weight, torch.Tensor):
            return kernels.dense_linear(weight)
        if isinstance(weight, Wna16Weight):
            return kernels.wna16_linear(weight)
        return kernels.int8_linear(weight) if kind == "w8a8" else kernels.fp8_linear(weight)

    def expert(index: int) -> Any:
        up, into = linear(gate_up.expert(index)), linear(down.expert(index))
        return lambda x: into(kernels.silu_and_mul(up(x)))

    x, logits = torch.randn(9, 64), torch.randn(9, 4)
    y = make_grouped_experts(gate_up, down, "silu", FACTS)(x, logits, 2, True)
    assert torch.equal(y, moe_mlp(x, logits, [expert(index) for index in range(4)], 2, True))
    assert not kernels.groups_experts, "the reference groups nothing in a run: its loop is the plain one"


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_never_waits_for_the_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without storage have no value to wait for: whatever asks for one raises. One launch a projection, whatever the routing."""
    from dspark.kernels.triton import launch as launcher
    from dspark.kernels.triton import moe

    launched: list[str] = []
    monkeypatch.setattr(launcher, "launch", lambda kernel, grid, *args, **config: launched.append(kernel.__name__))
    monkeypatch.setattr(launcher, "capability", lambda facts: (9, 0))
    gate_up, down = ExpertWeights(64), ExpertWeights(64)
    for stack, outputs, inputs in ((gate_up, 64, 96), (down, 96, 32)):
        weight = KINDS[kind](torch.float16, 0, outputs, inputs)
        parts = [weight] if kind == "dense" else list(weight.parts().values())
        names = ["weight"] if kind == "dense" else list(weight.parts())
        stack.put(0, weight)
        stack.tensors = {
            name: torch.empty(64, *part.shape, dtype=part.dtype, device="meta") for name, part in zip(names, parts, strict=True)
        }
    layer = moe.make_grouped_experts(gate_up, down, "silu", FACTS)
    y = layer(torch.empty(40, 96, dtype=torch.float16, device="meta"), torch.empty(40, 64, dtype=torch.float16, device="meta"), 8, True)
    assert tuple(y.shape) == (40, 96) and y.dtype == torch.float16
    products = [name for name in launched if name in ("dense_kernel", "wna16_kernel", "int8_kernel", "fp8_kernel")]
    assert len(products) == 2 and len(launched) <= 6, launched
