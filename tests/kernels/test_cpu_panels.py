"""Products in bfloat16 from panels: dense weights and codes, on tiles, with dot products, for few rows and for many."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dspark.kernels.cpu import linear as linear_module
from dspark.kernels.cpu import panels
from dspark.kernels.cpu.avx2_blocks import has_wide_floats
from dspark.kernels.cpu.avx2_panels import product_floats
from dspark.kernels.cpu.blocks import has_bf16_dots, has_bf16_tiles
from dspark.kernels.cpu.linear import make_dense_linear, make_wna16_linear
from dspark.kernels.cpu.wna16 import PanelWeight
from dspark.kernels.facts import KernelFacts
from dspark.kernels.packing import pack_codes
from dspark.kernels.wna16 import Wna16Weight

GENERATOR = torch.Generator().manual_seed(5)
PRODUCTS: dict[str, Callable[..., None]] = {}
if has_bf16_dots():
    PRODUCTS["dots"] = panels._product_dots
if has_bf16_tiles():
    PRODUCTS["tiles"] = panels._product_amx
DENSE_PRODUCTS = {**PRODUCTS, "floats": product_floats} if has_wide_floats() else PRODUCTS
product = pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS.keys())
dense_product = pytest.mark.parametrize("product", DENSE_PRODUCTS.values(), ids=DENSE_PRODUCTS.keys())
needs_floats = pytest.mark.skipif(not has_wide_floats(), reason="this CPU has no AVX2")
needs_dots = pytest.mark.skipif(not PRODUCTS, reason="this CPU has no dot products of bfloat16")
ROWS = (0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 33, 70)


def facts(dtype: torch.dtype = torch.bfloat16, **more: bool) -> KernelFacts:
    return KernelFacts("cpu", dtype, head_dim=64, num_heads=4, num_kv_heads=4, block_size=16, **more)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).bfloat16()


def codes(bits: int, outputs: int, inputs: int, group: int, symmetric: bool) -> Wna16Weight:
    drawn = torch.randint(0, 2**bits, (inputs, outputs), generator=GENERATOR, dtype=torch.uint8)
    groups = inputs // group
    zeros = None if symmetric else torch.randint(0, 2**bits, (groups, outputs), generator=GENERATOR, dtype=torch.uint8)
    scales = torch.rand(groups, outputs, generator=GENERATOR) / 2 ** (bits + 2) + 0.001
    return Wna16Weight(pack_codes(drawn, bits), scales, zeros, bits, inputs)


def check(linear: Callable[[torch.Tensor], torch.Tensor], dense: torch.Tensor, bias: torch.Tensor, weight_error: float) -> None:
    """Against float64. What may differ: the result's own rounding, sums in float32, and rounding of weights (0 for dense ones)."""
    for rows in ROWS:
        x = draw(rows, dense.shape[1])
        y, want = linear(x), x.double() @ dense.double().t() + bias.double()
        terms = x.double().abs() @ dense.double().abs().t() + bias.double().abs()
        assert y.dtype == torch.bfloat16 and y.shape == want.shape
        assert ((y.double() - want).abs() <= want.abs() * 2**-8 + terms * (2**-20 + weight_error)).all(), rows


@dense_product
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (33, 70), (64, 32), (96, 1100)])
def test_dense_weights(product: Callable[..., None], outputs: int, inputs: int) -> None:
    """Blocks of 32 outputs, tiles of 16 rows and 32 inputs: what lies beyond a matrix is no part of it."""
    weight, bias = draw(outputs, inputs), draw(outputs)
    check(panels.dense_panels(weight, bias, product), weight, bias, 0)
    assert torch.equal(panels.dense_panels(weight, None, product)(torch.zeros(3, inputs).bfloat16()), torch.zeros(3, outputs).bfloat16())


@product
@pytest.mark.parametrize("few_rows", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "outputs", "inputs", "group"), [(4, 48, 96, 32), (4, 33, 40, 40), (8, 48, 96, 16), (8, 33, 44, 44), (4, 32, 1152, 64)]
)
def test_codes(
    product: Callable[..., None], bits: int, outputs: int, inputs: int, group: int, symmetric: bool, few_rows: bool
) -> None:  # fmt: skip
    """The weight that counts is code times scale: ways that widen it to bfloat16 round it once more. 1152 inputs are several pieces."""
    weight, bias = codes(bits, outputs, inputs, group, symmetric), draw(outputs)
    check(panels.code_panels(weight, bias, product, few_rows), weight.dense(torch.float32), bias, 2**-9)


@needs_floats
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "outputs", "inputs", "group"),
    [(4, 48, 96, 32), (4, 16, 40, 40), (8, 48, 96, 16), (8, 80, 44, 44), (4, 32, 1152, 64), (8, 16, 600, 40)],
)
def test_codes_are_widened_to_what_the_dense_weight_is(bits: int, outputs: int, inputs: int, group: int, symmetric: bool) -> None:
    """On AVX2 alone: panels that fill half a block, inputs that fill no piece, groups that end inside one."""
    weight, x = codes(bits, outputs, inputs, group, symmetric), draw(70, inputs)
    want = panels.dense_panels(weight.dense(torch.bfloat16), None, product_floats)
    for rows in ROWS:
        assert torch.equal(PanelWeight(weight).widened_product(x[:rows]), want(x[:rows])), rows


@dense_product
@pytest.mark.parametrize("make", ["dense", "4 bits", "8 bits"])
def test_rows_do_not_depend_on_their_neighbours(product: Callable[..., None], make: str) -> None:
    """Deterministic runs need no fixed tiles then: a row alone, in any place and among any others has the same bits."""
    if make == "dense":
        linear: Callable[[torch.Tensor], torch.Tensor] = panels.dense_panels(draw(96, 600), None, product)
    elif product is product_floats:
        linear = PanelWeight(codes(int(make[0]), 96, 600, 40, False)).widened_product
    else:
        linear = panels.code_panels(codes(int(make[0]), 96, 600, 40, False), None, product, few_rows=False)
    x = draw(70, 600)
    y = linear(x)
    for row in (0, 7, 15, 16, 40, 69):
        assert torch.equal(linear(x[row : row + 1])[0], y[row])
    assert torch.equal(linear(x[3:20]), y[3:20])


@needs_floats
def test_not_a_number_stays_in_its_row() -> None:
    """Rows are filled up with zeros before tiles read them: memory that happened to hold NaN times a weight of 0 would be NaN."""
    weight = draw(40, 70)
    x = draw(20, 70)
    x[3, 69] = torch.nan
    for each in DENSE_PRODUCTS.values():
        y = panels.dense_panels(weight, None, each)(x)
        assert y[3].isnan().all() and y[[0, 2, 4, 19]].isfinite().all()


@needs_dots
def test_which_way_a_run_takes() -> None:
    """float32 runs, and weights whose groups end inside a line of codes, stay with the ways that were there."""
    weight = codes(4, 64, 64, 32, True)
    assert isinstance(make_wna16_linear(weight, None, facts()), panels.PanelLinear)
    assert not isinstance(make_wna16_linear(weight, None, facts(torch.float32)), panels.PanelLinear)
    assert not isinstance(make_wna16_linear(codes(4, 64, 64, 4, True), None, facts()), panels.PanelLinear)
    assert isinstance(make_dense_linear(draw(64, 64), None, facts(deterministic=True)), panels.PanelLinear)
    shadowed = make_wna16_linear(weight, None, facts(weight_shadow=True))
    x = draw(64, 64)
    for rows in (4, 64):
        torch.testing.assert_close(shadowed(x[:rows]).float(), x[:rows].float() @ weight.dense(torch.float32).t(), rtol=0.02, atol=0.02)


@needs_floats
def test_a_cpu_without_bfloat16_takes_its_own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's product of bfloat16 is ten times slower there than that of float32: no weight may end there."""
    monkeypatch.setattr(panels, "has_bf16_dots", lambda: False)
    monkeypatch.setattr(linear_module, "_has_onednn_bf16", lambda dtype: False)
    for deterministic in (False, True):
        made = make_dense_linear(draw(64, 64), None, facts(deterministic=deterministic))
        assert isinstance(made, panels.PanelLinear)
    assert not isinstance(make_dense_linear(draw(64, 64).float(), None, facts(torch.float32)), panels.PanelLinear)
    weight, bias, x = codes(4, 64, 64, 32, False), draw(64), draw(64, 64)
    monkeypatch.setattr(torch, "mm", None)
    for options in ({}, {"deterministic": True}, {"weight_shadow": True}):
        quantized = make_wna16_linear(weight, bias, facts(**options))
        for rows in (1, 5, 64):
            want = x[:rows].double() @ weight.dense(torch.float32).double().t() + bias
            torch.testing.assert_close(quantized(x[:rows]).double(), want, rtol=0.02, atol=0.02)
    fixed = make_wna16_linear(weight, None, facts(deterministic=True))
    assert torch.equal(fixed(x)[3:4], fixed(x[3:4]))
