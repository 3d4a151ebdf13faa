"""Run as a script with TRITON_INTERPRET=1: the Triton products against the reference; one JSON line a check. See `triton_interpreter`.

python triton_gemm_checks.py [NAME ...]      NAME: checks, all without one
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from gemm_cases import GEMM_CASES, act_order_args, fp8_linear_args, int8_linear_args
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import expected, run
from tolerances import assert_matches, tolerance
from triton_moe_checks import MOE_CHECKS

from dspark.kernels.dispatch import decline_reason, implementation
from dspark.kernels.facts import KernelFacts
from dspark.kernels.quant_math import tokens_to_fp8
from dspark.kernels.quantized_rows import InputFormat, input_format
from dspark.kernels.reference import linear as reference
from dspark.kernels.reference.quantize import quantize_rows as reference_rows
from dspark.kernels.triton import gemm_tiles
from dspark.kernels.triton.fp8 import make_fp8_linear
from dspark.kernels.triton.int8 import make_int8_linear
from dspark.kernels.triton.quantize import quantize_rows
from dspark.kernels.triton.wna16 import make_wna16_linear

DTYPES = {"float32": torch.float32, "float16": torch.float16}
SIZES = st.sampled_from([1, 15, 16, 17, 33, 64, 90, 130, 200])
TOKENS = st.sampled_from([0, 1, 2, 16, 17, 32, 33, 65])
BLOCKS = st.sampled_from([(-1, -1), (1, -1), (64, 64), (32, 96)])
random_shapes = settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def facts(dtype: torch.dtype = torch.float32, **more: bool) -> KernelFacts:
    return KernelFacts("cpu", dtype, head_dim=64, num_heads=4, num_kv_heads=2, block_size=16, interpreted=True, **more)


def case_check(op: str, index: int, dtype: torch.dtype) -> None:
    """One named shape: the dispatcher would take the Triton kernel, and it gives what the reference gives."""
    case = GEMM_CASES[op][index]
    reason = decline_reason("triton", op, case.facts(dtype, interpreted=True))
    assert reason is None, reason
    assert_matches(op, run(case, implementation("triton", op), dtype, interpreted=True), expected(case, dtype), dtype)


@random_shapes
@given(TOKENS, SIZES, SIZES, st.booleans(), st.integers(0, 99), st.sampled_from(list(DTYPES.values())))
def int8_equals_the_reference_to_the_last_bit(tokens: int, inputs: int, outputs: int, bias: bool, seed: int, dtype: torch.dtype) -> None:
    weight, shift, x = int8_linear_args(dtype, seed, tokens, inputs, outputs, bias)
    assert torch.equal(make_int8_linear(weight, shift, facts(dtype))(x), reference.make_int8_linear(weight, shift, facts(dtype))(x))


@random_shapes
@given(TOKENS, SIZES, SIZES, BLOCKS, st.sampled_from([None, "dynamic", "static"]), st.integers(0, 99))
def fp8_equals_the_reference(tokens: int, inputs: int, outputs: int, block: tuple[int, int], rounded: str | None, seed: int) -> None:
    weight, shift, x = fp8_linear_args(torch.float32, seed, tokens, inputs, outputs, block, rounded, bias=True)
    y, want = make_fp8_linear(weight, shift, facts())(x), reference.make_fp8_linear(weight, shift, facts())(x)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)


@random_shapes
@given(TOKENS, st.sampled_from([64, 192, 1024]), SIZES, st.sampled_from([4, 8]), st.booleans(), st.integers(0, 99))
def act_order_equals_the_reference(tokens: int, inputs: int, outputs: int, bits: int, symmetric: bool, seed: int) -> None:
    args = {"num_tokens": tokens, "out_features": outputs, "bits": bits, "symmetric": symmetric}
    weight, _, x = act_order_args(torch.float32, seed, inputs, **args)
    y, want = make_wna16_linear(weight, None, facts())(x), x @ weight.dense(torch.float32).t()
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)


@random_shapes
@given(
    st.integers(0, 5),
    st.sampled_from([1, 70, 576, 4097]),
    st.integers(-110, 60),
    st.integers(0, 99),
    st.sampled_from(list(DTYPES.values())),
)
def rows_are_quantized_to_the_last_bit(tokens: int, width: int, power: int, seed: int, dtype: torch.dtype) -> None:
    """Rows of any size: steps down to where float32 ends, and ties, which whole numbers make."""
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))
    x = ((8 * x).round() if seed % 2 else x).mul(2.0**power).to(dtype)
    x[1:2] = 0
    for inputs in (InputFormat("int8"), InputFormat("fp8"), InputFormat("fp8 static", torch.tensor(2.0 ** (power - 6)))):
        if inputs.kind != "int8" and not bool(tokens_to_fp8(x, inputs.scale)[1].gt(2.0**-126).all()):
            continue  # a scale below the normal numbers: torch and numpy differ there
        rows, want = quantize_rows(x, inputs), reference_rows(x, inputs)
        assert rows.codes.dtype == want.codes.dtype and torch.equal(rows.codes.float(), want.codes.float()), inputs
        assert torch.equal(rows.scales, want.scales), inputs


def rows_that_are_not_finite_give_nan() -> None:
    """Quantized to finite numbers they would hide a broken model; their neighbours are untouched."""
    for make, (weight, _, x) in (
        (make_int8_linear, int8_linear_args(torch.float32, 1, 6, 96, 40)),
        (make_fp8_linear, fp8_linear_args(torch.float32, 1, 6, 96, 40, inputs="dynamic")),
    ):
        linear = make(weight, None, facts())
        right = linear(x)
        x[2, 5], x[4, 95], x[5, 0] = torch.nan, torch.inf, -torch.inf
        y = linear(x)
        assert torch.equal(y[[0, 1, 3]], right[[0, 1, 3]]) and bool(y[[2, 4, 5]].isnan().all())
    weight, _, x = fp8_linear_args(torch.float32, 1, 4, 96, 40, inputs="static")
    x[2, 5], x[3, 1] = torch.nan, torch.inf
    y = make_fp8_linear(weight, None, facts())(x)
    assert bool(y[2].isnan().all()) and bool(y[[0, 1, 3]].isfinite().all()), "a static scale cuts what is infinite"


def quantized_rows_are_taken_as_they_are() -> None:
    """What the op before a linear quantized gives the bits that the linear gives on its own."""
    for make, args in ((make_int8_linear, int8_linear_args), (make_fp8_linear, partial(fp8_linear_args, inputs="dynamic"))):
        weight, bias, x = args(torch.float16, 3, 19, 200, 70, bias=True)
        linear = make(weight, bias, facts(torch.float16))
        inputs = input_format(linear)
        assert inputs is not None
        y = linear(quantize_rows(x, inputs))
        assert y.dtype == torch.float16 and torch.equal(y, linear(x))


def splits_add_up_in_their_order() -> None:
    """A split product is deterministic, differs from a whole one by rounding alone, and integers not at all."""
    weight, bias, x = int8_linear_args(torch.float32, 5, 20, 4096, 72, bias=True)
    linear = make_int8_linear(weight, bias, facts())
    assert gemm_tiles.bytes_tile(20, 72, 4096).splits == 5
    split = linear(x)
    real, gemm_tiles.split = gemm_tiles.split, lambda tile, *_: replace(tile, splits=1)
    try:
        assert torch.equal(split, make_int8_linear(weight, bias, facts())(x))
    finally:
        gemm_tiles.split = real
    weight, bias, x = act_order_args(torch.float32, 5, 4096, num_tokens=9, out_features=40)
    linear = make_wna16_linear(weight, bias, facts())
    first = linear(x)
    assert gemm_tiles.wna16_tile(9, 40, 4096, 64, 4, False).splits > 1 and torch.equal(first, linear(x))


def deterministic_rows_depend_on_nothing_else() -> None:
    """A row's bits are the same alone and among others, in every form that rounds its sums."""
    known = facts(torch.float16, deterministic=True)
    for make, (weight, bias, x) in (
        (make_wna16_linear, act_order_args(torch.float16, 7, 1024, num_tokens=70, out_features=48, bias=True)),
        (make_fp8_linear, fp8_linear_args(torch.float16, 7, 70, 1024, 48, bias=True)),
        (make_fp8_linear, fp8_linear_args(torch.float16, 7, 70, 1024, 48, (64, 64), "dynamic")),
        (make_int8_linear, int8_linear_args(torch.float16, 7, 70, 1024, 48)),
    ):
        linear = make(weight, bias, known)
        whole = linear(x)
        for rows in (slice(0, 1), slice(3, 20), slice(30, 70)):
            assert torch.equal(linear(x[rows]), whole[rows])


def weights_are_rows_on_hopper_alone() -> None:
    """Few tokens: the product is turned around on capability 9.0 and not on 8.9; both are the same sums."""
    from dspark.kernels.triton import fp8
    from dspark.kernels.triton import launch as launcher

    tile, real = gemm_tiles.bytes_tile(5, 70, 200), launcher.capability
    for block in ((1, -1), (64, 64)):
        weight, bias, x = fp8_linear_args(torch.float32, 3, 5, 200, 70, block, "dynamic", bias=True)
        linear = make_fp8_linear(weight, bias, facts())
        assert fp8.swaps(tile, facts())
        turned = linear(x)
        launcher.capability = lambda facts: (8, 9)
        try:
            assert not fp8.swaps(tile, facts())
            torch.testing.assert_close(linear(x), turned, rtol=1e-5, atol=1e-6)
        finally:
            launcher.capability = real


def before_capability_8_9_inputs_are_rounded_instead() -> None:
    """The product of float8 numbers declines and says why; the linear then rounds its inputs and widens the weight."""
    from dspark.kernels.triton import fp8
    from dspark.kernels.triton import launch as launcher

    weight, bias, x = fp8_linear_args(torch.float32, 3, 19, 200, 70, inputs="dynamic", bias=True)
    assert fp8.decline_fp8_product(facts()) is None and input_format(make_fp8_linear(weight, bias, facts())) == InputFormat("fp8")
    real, launcher.capability = launcher.capability, lambda facts: (8, 0)
    try:
        assert "need compute capability 8.9, the device has 8.0" in (fp8.decline_fp8_product(facts()) or "")
        linear = make_fp8_linear(weight, bias, facts())
        assert input_format(linear) is None
        rtol, atol = tolerance("make_fp8_linear", torch.float32)
        torch.testing.assert_close(linear(x), reference.make_fp8_linear(weight, bias, facts())(x), rtol=rtol, atol=atol)
    finally:
        launcher.capability = real


CHECKS: dict[str, Callable[[], None]] = {
    f"{case}-{name}": partial(case_check, op, index, dtype)
    for op, cases in GEMM_CASES.items()
    for index, case in enumerate(cases)
    for name, dtype in DTYPES.items()
}
CHECKS |= {
    check.__name__: check
    for check in (
        int8_equals_the_reference_to_the_last_bit,
        fp8_equals_the_reference,
        act_order_equals_the_reference,
        rows_are_quantized_to_the_last_bit,
        rows_that_are_not_finite_give_nan,
        quantized_rows_are_taken_as_they_are,
        splits_add_up_in_their_order,
        deterministic_rows_depend_on_nothing_else,
        weights_are_rows_on_hopper_alone,
        before_capability_8_9_inputs_are_rounded_instead,
    )
}
CHECKS |= MOE_CHECKS


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CHECKS:
        start, error = time.perf_counter(), None
        try:
            CHECKS[name]()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"id": name, "error": error, "seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
