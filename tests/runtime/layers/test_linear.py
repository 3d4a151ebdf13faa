"""Linear layers from an engine's tensors: what is stacked into one product, what is not, and that both are the same function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark.kernels.facts import KernelFacts
from dspark.kernels.ops import Fp8Weight, Int8Weight, Kernels, Wna16Weight
from dspark.kernels.packing import pack_codes
from dspark.runtime.layers import fp8, int8, wna16
from dspark.runtime.layers.linear import build_weight, load_linear
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.quant import QuantConfig, QuantScheme

GENERATOR = torch.Generator().manual_seed(5)
KERNELS = Kernels(KernelFacts("cpu", torch.float32, head_dim=64, num_heads=4, num_kv_heads=4, block_size=16), "reference")
SYM, ASYM = QuantScheme("w4a16", 4, True, 32), QuantScheme("w4a16-asym", 4, False, 32)


class Tensors:
    """A WeightSource over a dict."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    def take(self, name: str) -> torch.Tensor:
        return self.tensors.pop(name)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def codes(outputs: int, bits: int = 4, inputs: int = 64) -> torch.Tensor:
    return pack_codes(torch.randint(0, 2**bits, (inputs, outputs), generator=GENERATOR, dtype=torch.uint8), bits)


def weight(scheme: QuantScheme, outputs: int, perm: torch.Tensor | None = None) -> Wna16Weight:
    zeros = None if scheme.symmetric else torch.randint(0, 16, (2, outputs), generator=GENERATOR, dtype=torch.uint8)
    return Wna16Weight(codes(outputs), draw(2, outputs).half(), zeros, 4, 64, perm)


def float8(outputs: int, block: tuple[int, int]) -> Fp8Weight:
    grid = [1 if size == -1 else -(-extent // size) for size, extent in zip(block, (outputs, 64), strict=True)]
    return Fp8Weight(draw(outputs, 64).to(torch.float8_e4m3fn), draw(*grid).abs(), block)


PERM = torch.randperm(64, generator=GENERATOR).to(torch.int32)
OTHER = torch.randperm(64, generator=GENERATOR).to(torch.int32)
ORDERED = replace(SYM, act_order=True)
PAIRS: dict[str, tuple[Any, QuantScheme, Any, QuantScheme, bool]] = {
    "alike": (weight(SYM, 8), SYM, weight(SYM, 16), SYM, True),
    "symmetric and not": (weight(SYM, 8), SYM, weight(ASYM, 16), ASYM, True),
    "one order of inputs": (weight(SYM, 8, PERM), ORDERED, weight(SYM, 16, PERM.clone()), ORDERED, True),
    "two orders": (weight(SYM, 8, PERM), ORDERED, weight(SYM, 16, OTHER), ORDERED, False),
    "ordered and not": (weight(SYM, 8, PERM), ORDERED, weight(SYM, 16), SYM, False),
    "tensor scales": (
        float8(8, (-1, -1)),
        QuantScheme("fp8", 8, storage="fp8", block=(-1, -1)),
        float8(16, (-1, -1)),
        QuantScheme("fp8", 8, storage="fp8", block=(-1, -1)),
        True,
    ),
    "blocks": (
        float8(32, (16, 16)),
        QuantScheme("fp8", 8, storage="fp8", block=(16, 16)),
        float8(40, (16, 16)),
        QuantScheme("fp8", 8, storage="fp8", block=(16, 16)),
        True,
    ),
    "a block over the border": (
        float8(40, (16, 16)),
        QuantScheme("fp8", 8, storage="fp8", block=(16, 16)),
        float8(32, (16, 16)),
        QuantScheme("fp8", 8, storage="fp8", block=(16, 16)),
        False,
    ),
    "int8": (
        Int8Weight(torch.randint(-128, 128, (8, 64), generator=GENERATOR, dtype=torch.int8), draw(8)),
        QuantScheme("w8a8", 8, storage="int8"),
        Int8Weight(torch.randint(-128, 128, (16, 64), generator=GENERATOR, dtype=torch.int8), draw(16)),
        QuantScheme("w8a8", 8, storage="int8"),
        True,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_modules_are_one_function(name: str) -> None:
    first, first_scheme, second, second_scheme, stacks = PAIRS[name]
    stack = {Wna16Weight: wna16.stack, Fp8Weight: fp8.stack, Int8Weight: int8.stack}[type(first)]
    stacked = stack([first, second])  # type: ignore[list-item]
    assert (stacked is not None) == stacks
    if stacked is not None:
        dense = torch.cat([first.dense(torch.float32), second.dense(torch.float32)])
        assert torch.equal(stacked.dense(torch.float32), dense)

    tensors = {f"{module}.{leaf}": part for module, w in (("a", first), ("b", second)) for leaf, part in w.parts().items()}
    tensors["b.bias"] = draw(second.out_features)
    source = Tensors(tensors)
    both = load_linear(["a", "b"], source, QuantConfig.of_modules({"a": first_scheme, "b": second_scheme}), KERNELS)
    assert not source.tensors
    x = draw(3, 64)
    apart = [
        load_linear(["a"], Tensors(tensors), QuantConfig.of_modules({"a": first_scheme}), KERNELS)(x),
        load_linear(["b"], Tensors(tensors), QuantConfig.of_modules({"b": second_scheme}), KERNELS)(x),
    ]
    torch.testing.assert_close(both(x), torch.cat(apart, -1), rtol=1e-5, atol=1e-5)


def test_a_dense_module_beside_a_quantized_one() -> None:
    packed, dense = weight(SYM, 8), draw(16, 64)
    tensors = {**{f"a.{leaf}": part for leaf, part in packed.parts().items()}, "b.weight": dense}
    linear = load_linear(["a", "b"], Tensors(tensors), QuantConfig.of_modules({"a": SYM}), KERNELS)
    x = draw(3, 64)
    want = torch.cat([x @ packed.dense(torch.float32).t(), x @ dense.t()], -1)
    torch.testing.assert_close(linear(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scheme", "parts", "words"),
    [
        (SYM, {"qweight": codes(8), "scales": draw(3, 8)}, r"qweight \[8, 8\], scales \[3, 8\] do not fit each other"),
        (SYM, {"qweight": codes(8), "scales": draw(2, 9)}, "do not fit each other"),
        (replace(SYM, group_size=-1), {"qweight": codes(8), "scales": draw(2, 8)}, "do not fit each other"),
        (ORDERED, {"qweight": codes(8), "scales": draw(2, 8), "perm": PERM[:60]}, "do not fit each other"),
        (
            QuantScheme("fp8", 8, storage="fp8", block=(16, 16)),
            {"qweight": draw(32, 64).to(torch.float8_e4m3fn), "scales": draw(2, 3)},
            "blocks of 16 x 16",
        ),
        (QuantScheme("w8a8", 8, storage="int8"), {"qweight": torch.ones(8, 64, dtype=torch.int8), "scales": draw(7)}, "7"),
    ],
)
def test_tensors_that_do_not_fit_are_named(scheme: QuantScheme, parts: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(InputError, match=f"down_proj: .*{words}"):
        build_weight("down_proj", scheme, parts)


def test_padded_rows_do_not_make_inputs() -> None:
    """100 inputs of 3 bits fill 10 words with room for 106: the group size says how many there are."""
    scheme = QuantScheme("w3a16", 3, True, 20)
    built = build_weight("a", scheme, {"qweight": codes(8, 3, 100), "scales": draw(5, 8)})
    assert built.in_features == 100 and built.dense(torch.float32).shape == (8, 100)
