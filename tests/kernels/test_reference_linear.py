"""Reference linears against numbers worked out by hand and against a loop over codes."""

import pytest
import torch
from kernel_cases import CASES, Case, call
from tolerances import tolerance

from dspark.kernels.dispatch import implementation
from dspark.kernels.packing import unpack_codes
from dspark.kernels.reference.linear import make_dense_linear, make_wna16_linear
from dspark.kernels.wna16 import Wna16Weight


def test_wna16_by_hand() -> None:
    """K = 8 inputs in one word, code k = k: 0x76543210. Symmetric 4 bit: weight (k - 8) * 0.5; ones in, sum out = -18."""
    weight = Wna16Weight(torch.tensor([[0x76543210]], dtype=torch.int32), torch.tensor([[0.5]]), None, 4, 8)
    facts = CASES["make_wna16_linear"][0].facts(torch.float32)
    linear = make_wna16_linear(weight, torch.tensor([1.0]), facts)
    assert linear(torch.ones(1, 8)).tolist() == [[-17.0]]
    assert linear(torch.eye(8)[3:4]).tolist() == [[-1.5]]  # (3 - 8) * 0.5 + 1


def test_wna16_zero_points_by_hand() -> None:
    """Two groups of 4 codes, 8 bit: zeros 1 and 250, scales 2 and 1."""
    words = torch.tensor([[0x03020100], [-1]], dtype=torch.int32)  # codes 0 1 2 3, then 255 four times
    weight = Wna16Weight(words, torch.tensor([[2.0], [1.0]]), torch.tensor([[1], [250]], dtype=torch.uint8), 8, 8)
    linear = make_wna16_linear(weight, None, CASES["make_wna16_linear"][0].facts(torch.float32))
    assert linear(torch.eye(8)).flatten().tolist() == [-2.0, 0.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0]


@pytest.mark.parametrize("case", CASES["make_wna16_linear"], ids=str)
def test_wna16_equals_a_float64_product(case: Case) -> None:
    weight, bias, x = args = case.args(torch.float32)
    codes = unpack_codes(weight.qweight, weight.bits, weight.in_features).double()
    group = torch.arange(weight.in_features) // weight.group_size
    zero = 2.0 ** (weight.bits - 1) if weight.zeros is None else weight.zeros.double()[group]
    want = x.double() @ ((codes - zero) * weight.scales.double()[group]) + (0 if bias is None else bias.double())
    rtol, atol = tolerance(case.op, torch.float32)
    actual = call(case.op, make_wna16_linear, args, case.facts(torch.float32))["y"]
    torch.testing.assert_close(actual.double(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES["make_dense_linear"], ids=str)
def test_dense_equals_a_float64_product(case: Case, dtype: torch.dtype) -> None:
    weight, bias, x = args = case.args(dtype)
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    rtol, atol = tolerance(case.op, dtype)
    actual = call(case.op, implementation("reference", case.op), args, case.facts(dtype))["y"]
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), want, rtol=rtol, atol=atol)


def test_dense_takes_the_bias() -> None:
    linear = make_dense_linear(torch.eye(2), torch.tensor([1.0, 2.0]), CASES["make_dense_linear"][0].facts(torch.float32))
    assert linear(torch.zeros(1, 2)).tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("op", ["make_dense_linear", "make_wna16_linear"])
def test_deterministic_products_give_a_row_the_same_bits_in_every_batch(op: str) -> None:
    """They are what a GPU's dense layers take: its library, too, picks another kernel for another number of rows."""
    shape = {"num_tokens": 150, "in_features": 512, "out_features": 96}
    case = Case(op, "rows", CASES[op][0].make, shape)
    weight, bias, x = case.args(torch.float32)
    linear = implementation("reference", op)(weight, bias, case.facts(torch.float32, deterministic=True))
    together = linear(x)
    rtol, atol = tolerance(op, torch.float32)
    torch.testing.assert_close(together, implementation("reference", op)(weight, bias, case.facts(torch.float32))(x), rtol=rtol, atol=atol)
    assert linear(x[:0]).shape == (0, 96)
    for rows in (slice(0, 1), slice(149, 150), slice(3, 70), slice(64, 128)):
        assert torch.equal(linear(x[rows]), together[rows])
