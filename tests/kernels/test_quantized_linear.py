"""FP8 and W8A8 linears, permuted inputs and odd code widths: by hand, and every implementation against the definition."""

from __future__ import annotations

import pytest
import torch

from dspark.kernels.dispatch import candidates, implementation
from dspark.kernels.facts import KernelFacts
from dspark.kernels.ops import Fp8Weight, Int8Weight, Kernels, Wna16Weight
from dspark.kernels.packing import pack_codes
from dspark.kernels.quant_math import dequantize_blocks, quantize_tokens, round_tokens_to_fp8

GENERATOR = torch.Generator().manual_seed(3)


def facts(dtype: torch.dtype = torch.float32, **more: bool) -> KernelFacts:
    return KernelFacts("cpu", dtype, head_dim=64, num_heads=4, num_kv_heads=4, block_size=16, **more)


def on_a_cpu(op: str) -> list[str]:
    """The implementations of an op that run on a CPU's tensors."""
    return [name for name in candidates(op) if name != "triton"]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def test_blocks_share_a_scale_by_hand() -> None:
    """3 x 5 numbers, blocks of 2 x 3: the last blocks are cut off by the matrix."""
    scales = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
    dense = dequantize_blocks(torch.ones(3, 5), scales, (2, 3), torch.float32)
    assert dense.tolist() == [[1, 1, 1, 10, 10], [1, 1, 1, 10, 10], [100, 100, 100, 1000, 1000]]
    assert dequantize_blocks(torch.ones(2, 2), torch.tensor([[3.0]]), (-1, -1), torch.float32).tolist() == [[3, 3], [3, 3]]
    assert dequantize_blocks(torch.ones(2, 2), torch.tensor([[3.0], [4.0]]), (1, -1), torch.float32).tolist() == [[3, 3], [4, 4]]
    with pytest.raises(ValueError, match="do not fit blocks"):
        dequantize_blocks(torch.ones(3, 5), scales, (1, -1), torch.float32)


def test_fp8_bytes_by_hand() -> None:
    """0x7E is 448, 0x01 is 2**-9, 0xC5 is -3.25."""
    codes = torch.tensor([[0x7E, 0x01, 0xC5]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = Fp8Weight(codes, torch.tensor([[2.0]]), (-1, -1))
    assert weight.dense(torch.float32).tolist() == [[896.0, 2**-8, -6.5]]


def test_tokens_are_quantized_by_hand() -> None:
    """Steps of max / 127.5: the largest value falls on 127.5 and is cut to 127, its negative reaches -128; a token of zeros stays zero."""
    codes, scale = quantize_tokens(torch.tensor([[127.5, 1.0, 0.5, 1.5], [-255.0, 2.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert scale.flatten().tolist() == [1.0, 2.0, 1.0]
    assert codes.tolist() == [[127, 1, 0, 2], [-128, 1, 0, 0], [0, 0, 0, 0]]  # 0.5 and 1.5 round to even


def test_int8_linear_by_hand() -> None:
    """Two outputs of scales 0.5 and 2; x = (127.5, 1) becomes (127, 1) with step 1."""
    weight = Int8Weight(torch.tensor([[1, -2], [3, 4]], dtype=torch.int8), torch.tensor([0.5, 2.0]))
    for name in on_a_cpu("make_int8_linear"):
        linear = implementation(name, "make_int8_linear")(weight, torch.tensor([0.0, 1.0]), facts())
        assert linear(torch.tensor([[127.5, 1.0]])).tolist() == [[62.5, 771.0]], name  # 0.5 * (127 - 2), 2 * (381 + 4) + 1


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_int8_implementation_sums_exactly(num_tokens: int, dtype: torch.dtype, deterministic: bool) -> None:
    """Integer sums have no rounding: all implementations agree to the last bit, whatever stands beside a row."""
    weight = Int8Weight(torch.randint(-128, 128, (33, 70), generator=GENERATOR, dtype=torch.int8), draw(33).abs())
    x = draw(num_tokens, 70).to(dtype)
    want = implementation("reference", "make_int8_linear")(weight, None, facts(dtype))(x)
    assert want.shape == (num_tokens, 33) and want.dtype == dtype
    for name in on_a_cpu("make_int8_linear"):
        linear = implementation(name, "make_int8_linear")(weight, None, facts(dtype, deterministic=deterministic))
        assert torch.equal(linear(x), want), name
        for row in range(min(num_tokens, 3)):
            assert torch.equal(linear(x[row : row + 1])[0], want[row]), name


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (32, 16), (1, 10)])
@pytest.mark.parametrize("num_tokens", [0, 1, 70])
def test_every_fp8_implementation(block: tuple[int, int], num_tokens: int) -> None:
    rows, columns = (33 if block[0] == -1 else block[0]), (70 if block[1] == -1 else block[1])
    weight = Fp8Weight(draw(33, 70).to(torch.float8_e4m3fn), draw(-(-33 // rows), -(-70 // columns)).abs(), block)
    x, bias = draw(num_tokens, 70), draw(33)
    want = x.double() @ weight.dense(torch.float32).double().t() + bias
    for name in on_a_cpu("make_fp8_linear"):
        y = implementation(name, "make_fp8_linear")(weight, bias, facts())(x)
        torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)


def packed(bits: int, symmetric: bool, perm: torch.Tensor | None = None) -> Wna16Weight:
    codes = torch.randint(0, 2**bits, (96, 48), generator=GENERATOR, dtype=torch.uint8)
    zeros = None if symmetric else torch.randint(0, 2**bits, (3, 48), generator=GENERATOR, dtype=torch.uint8)
    return Wna16Weight(pack_codes(codes, bits), draw(3, 48).abs(), zeros, bits, 96, perm)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
def test_wider_lanes_hold_the_same_numbers(bits: int, symmetric: bool) -> None:
    weight = packed(bits, symmetric)
    wide = weight.in_lanes()
    assert wide.bits == (4 if bits <= 4 else 8) and (wide.zeros is None) == symmetric
    assert torch.equal(wide.dense(torch.float32), weight.dense(torch.float32))


@pytest.mark.parametrize("choice", ["reference", "auto"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_inputs_of_a_permuted_weight_are_gathered(choice: str, bits: int) -> None:
    """Stored row j belongs to input perm[j]: the dense weight has its columns where the inputs are."""
    perm = torch.randperm(96, generator=GENERATOR).to(torch.int32)
    weight = packed(bits, False, perm)
    stored = weight.without_perm().dense(torch.float32)
    assert torch.equal(weight.dense(torch.float32)[:, perm.long()], stored)
    x, bias = draw(7, 96), draw(48)
    y = Kernels(facts(), choice).wna16_linear(weight, bias)(x)
    torch.testing.assert_close(y, x @ weight.dense(torch.float32).t() + bias, rtol=1e-4, atol=1e-3)


def test_exact_activations_leave_inputs_alone() -> None:
    weight = Int8Weight(torch.randint(-128, 128, (33, 70), generator=GENERATOR, dtype=torch.int8), draw(33).abs())
    x = draw(3, 70)
    y = Kernels(facts(exact_activations=True)).int8_linear(weight)(x)
    torch.testing.assert_close(y, x @ weight.dense(torch.float32).t(), rtol=1e-4, atol=1e-3)
    assert not torch.allclose(y, Kernels(facts()).int8_linear(weight)(x), rtol=1e-4, atol=1e-3)


def test_inputs_are_rounded_to_float8_by_hand() -> None:
    """e4m3 between 32 and 64 has steps of 4, between 256 and 448 of 32."""
    x = torch.tensor([[448.0, 33.0, 35.0, 300.0], [0.0, 0.0, 0.0, 0.0]])
    assert round_tokens_to_fp8(x).tolist() == [[448.0, 32.0, 36.0, 288.0], [0.0, 0.0, 0.0, 0.0]]
    assert round_tokens_to_fp8(2 * x, torch.tensor(2.0)).tolist() == [[896.0, 64.0, 72.0, 576.0], [0.0, 0.0, 0.0, 0.0]]
    assert round_tokens_to_fp8(x, torch.tensor(0.5))[0, 0] == 224.0, "beyond 448 it is cut"


@pytest.mark.parametrize(("inputs", "scale"), [("dynamic", None), ("static", torch.tensor(0.01))])
@pytest.mark.parametrize("choice", ["reference", "auto"])
def test_a_float8_linear_rounds_its_inputs(choice: str, inputs: str, scale: torch.Tensor | None) -> None:
    weight = Fp8Weight(draw(32, 64).to(torch.float8_e4m3fn), torch.full((32, 1), 0.02), (1, -1), inputs, scale)
    x = draw(5, 64)
    linear = Kernels(facts(), choice).fp8_linear(weight)
    torch.testing.assert_close(linear(x), round_tokens_to_fp8(x, scale) @ weight.dense(torch.float32).t(), rtol=1e-5, atol=1e-5)
    exact = Kernels(facts(exact_activations=True), choice).fp8_linear(weight)
    torch.testing.assert_close(exact(x), x @ weight.dense(torch.float32).t(), rtol=1e-5, atol=1e-5)
