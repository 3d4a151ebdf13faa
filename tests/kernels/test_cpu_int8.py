"""Compiled products of 8-bit integers: every way to compute them against the definition, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dspark.kernels.cpu import int8
from dspark.kernels.cpu.avx2_blocks import has_wide_floats
from dspark.kernels.cpu.avx2_panels import product_pairs
from dspark.kernels.cpu.blocks import has_int8_dots, has_int8_tiles
from dspark.kernels.facts import KernelFacts
from dspark.kernels.ops import Int8Weight
from dspark.kernels.reference.linear import LinearFn
from dspark.kernels.reference.linear import make_int8_linear as reference

GENERATOR = torch.Generator().manual_seed(8)
Make = Callable[[Int8Weight, torch.Tensor | None], LinearFn]
WAYS: dict[str, Make] = {"float": int8._float_linear}
if has_wide_floats():
    WAYS["avx2"] = lambda weight, bias: int8.Int8Panels(weight, bias, product_pairs)
if has_int8_dots():
    WAYS["vnni"] = lambda weight, bias: int8.Int8Panels(weight, bias, int8._product_vnni)
if has_int8_tiles():
    WAYS["amx"] = lambda weight, bias: int8.Int8Panels(weight, bias, int8._product_amx)
way = pytest.mark.parametrize("make", WAYS.values(), ids=WAYS.keys())
DTYPES = (torch.float32, torch.bfloat16)


def facts(dtype: torch.dtype = torch.float32) -> KernelFacts:
    return KernelFacts("cpu", dtype, head_dim=64, num_heads=4, num_kv_heads=4, block_size=16)


def draw_weight(outputs: int, inputs: int) -> Int8Weight:
    codes = torch.randint(-128, 128, (outputs, inputs), generator=GENERATOR, dtype=torch.int8)
    return Int8Weight(codes, torch.rand(outputs, generator=GENERATOR) / 100)


@way
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 3), (33, 70), (32, 64), (96, 1100)])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_shapes_that_fill_no_tile(make: Make, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Blocks of 32 outputs and 64 inputs, of 16, 32 and 8 rows: what lies beyond a matrix must not reach a result."""
    weight, bias = draw_weight(outputs, inputs), torch.randn(outputs, generator=GENERATOR)
    linear, want = make(weight, bias), reference(weight, bias, facts(dtype))
    for rows in (0, 1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 100):
        x = torch.randn(rows, inputs, generator=GENERATOR).to(dtype)
        y = linear(x)
        assert y.dtype == dtype and torch.equal(y, want(x)), rows


@way
def test_sums_do_not_saturate(make: Make) -> None:
    """Instructions before VNNI add pairs of products in 16 bits: 2 * 255 * 128 is cut to 32767 there, silently."""
    weight = Int8Weight(torch.full((40, 4096), -128, dtype=torch.int8), torch.ones(40))
    weight.qweight[1] = 127
    x = torch.full((3, 4096), -255.0)
    x[1:, 1::2] = 255.0
    codes = torch.full((3, 4096), -128.0)
    codes[1:, 1::2] = 127.0
    assert torch.equal(make(weight, None)(x), codes @ weight.qweight.float().t() * 2.0)


@way
def test_tokens_without_a_step(make: Make) -> None:
    """Zeros stay zero, and tokens with infinity or NaN give NaN: quantized to finite numbers they would hide a broken model."""
    weight, bias = draw_weight(32, 70), torch.ones(32)
    x = torch.randn(5, 70, generator=GENERATOR)
    x[1], x[2] = 0.0, 2.0**-120
    x[3, 69], x[4, 2] = torch.nan, -torch.inf
    y, want = make(weight, bias)(x), reference(weight, bias, facts())(x)
    assert torch.equal(y[:3], want[:3]) and torch.equal(y[1:3], torch.ones(2, 32))
    assert y[3:].isnan().all() and want[3:].isnan().all()


@way
def test_inputs_that_are_a_part_of_something(make: Make) -> None:
    """Columns of a wider matrix are not contiguous."""
    weight = draw_weight(32, 64)
    wide = torch.randn(6, 100, generator=GENERATOR)
    assert torch.equal(make(weight, None)(wide[:, 20:84]), reference(weight, None, facts())(wide[:, 20:84].clone()))


def test_every_cpu_has_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the instructions, and for sums that could leave 32 bits, the product is exact in floating point."""
    has_own = has_int8_dots() or has_int8_tiles() or has_wide_floats()
    assert isinstance(int8.make_int8_linear(draw_weight(32, 64), None, facts()), int8.Int8Panels) == has_own
    monkeypatch.setattr(int8, "MAX_INPUTS", 63)
    assert not isinstance(int8.make_int8_linear(draw_weight(32, 64), None, facts()), int8.Int8Panels)
    monkeypatch.undo()
    monkeypatch.setattr(int8, "has_int8_tiles", lambda: False)
    monkeypatch.setattr(int8, "has_int8_dots", lambda: False)
    assert int8.vector_product() is (product_pairs if has_wide_floats() else None)
    monkeypatch.setattr(int8, "has_wide_floats", lambda: False)
    assert int8.vector_product() is None
    assert not isinstance(int8.make_int8_linear(draw_weight(32, 64), None, facts()), int8.Int8Panels)
