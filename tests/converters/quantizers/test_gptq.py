"""GPTQ and GPTAQ: code for code against the slow reference, by hand, where it falls back, and against rounding to nearest."""

from __future__ import annotations

from dataclasses import replace

import gptq_reference as reference
import numpy as np
import pytest
import torch

from dspark.converters.quantizers.base import DEFAULTS, SolverOptions, quantizer, stored_scheme
from dspark.converters.quantizers.factor import hessian_factor
from dspark.converters.quantizers.gptq import Solution, quantize_gptq, solve
from dspark.converters.quantizers.integers import integer_problem
from dspark.converters.quantizers.rtn import quantize_rtn
from dspark.converters.quantizers.statistics import LayerStatistics, StatisticsAccumulator
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.quant import PRESETS, QuantScheme

LEGACY = SolverOptions(clip=False, act_order=False, static_groups=False, legacy=True)
INTEGER_SCHEMES = [name for name, scheme in PRESETS.items() if scheme.storage != "fp8"]


def correlated_inputs(tokens: int, width: int, seed: int = 0, rank: int = 24) -> torch.Tensor:
    """Inputs with a few strong directions and channels of very different size, as those of trained models."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(tokens, rank, generator=generator) @ torch.randn(rank, width, generator=generator)
    sizes = torch.exp(torch.randn(width, generator=generator))
    return (shared + torch.randn(tokens, width, generator=generator)) * sizes


def statistics_of(x: torch.Tensor, full: torch.Tensor | None = None) -> LayerStatistics:
    accumulator = StatisticsAccumulator(x.shape[1], cross=full is not None)
    accumulator.add(x, full)
    return accumulator.finish()


def statistics_from(hessian: np.ndarray, cross: np.ndarray | None = None) -> LayerStatistics:
    nothing = torch.zeros(len(hessian))
    return LayerStatistics(torch.from_numpy(hessian), nothing, nothing, 100, None if cross is None else torch.from_numpy(cross))


def random_weight(outputs: int, inputs: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.05


def solve_with(weight: torch.Tensor, statistics: LayerStatistics, scheme: QuantScheme, options: SolverOptions) -> Solution:
    """The solver in the weight's own dtype."""
    factor = hessian_factor(statistics, options, weight.dtype)
    assert factor is not None
    return solve(integer_problem(weight, scheme, options), factor, options)


def codes_in_order(solution: Solution) -> np.ndarray:
    """[N, K] in the order of the inputs."""
    codes, perm = solution.codes.codes, solution.codes.perm
    return (codes if perm is None else torch.empty_like(codes).index_copy_(0, perm, codes)).t().numpy()


SETTINGS = [
    reference.Setting(),
    reference.Setting(group_size=64, act_order=True),
    reference.Setting(group_size=128, symmetric=False),
    reference.Setting(group_size=-1, act_order=True),
    reference.Setting(group_size=64, act_order=True, static_groups=True, search=True),
    reference.Setting(group_size=64, symmetric=False, act_order=True, search=True),
    reference.Setting(group_size=32, bits=3, static_groups=True, damp=0.1),
    reference.Setting(group_size=128, bits=2, symmetric=False, act_order=True, static_groups=True),
    reference.Setting(group_size=-1, bits=8),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_codes_are_those_of_the_reference(setting: reference.Setting, dtype: torch.dtype) -> None:
    """Two blocks and more, two dead inputs, a row without negative weights. In float32 a value between two codes may fall to either side,
    and what comes after in its row with it."""
    weight = random_weight(70, 256).to(dtype)
    weight[3] = weight[3].abs()
    x = correlated_inputs(600, 256).double()
    x[:, [5, 77]] = 0
    hessian = (2 / len(x) * x.t() @ x).to(dtype).numpy()
    wanted = reference.gptq(weight.numpy(), hessian, setting)
    options = replace(LEGACY, clip=setting.search, act_order=setting.act_order, static_groups=setting.static_groups, damp=setting.damp)
    scheme = QuantScheme("test", setting.bits, setting.symmetric, setting.group_size)
    found = solve_with(weight, statistics_from(hessian), scheme, options)
    rows = (codes_in_order(found) == wanted.codes).all(1)
    assert rows.all() if dtype == torch.float64 else rows.mean() > 0.95
    step = 1e-12 if dtype == torch.float64 else 1e-5
    assert np.abs(found.values.t().numpy() - wanted.values)[rows].max() < step
    assert np.abs(found.codes.scale.t().numpy() - wanted.steps)[rows].max() < step
    assert np.array_equal(found.codes.zero.t().numpy()[rows], wanted.zeros[rows])


@pytest.mark.parametrize("block_columns", [1, 32, 100, 4096])
def test_blocks_do_not_change_codes(block_columns: int) -> None:
    """They only save memory traffic. (Groups that start in a block do see older weights: not so with static ones.)"""
    weight, statistics = random_weight(20, 192).double(), statistics_of(correlated_inputs(500, 192))
    scheme = QuantScheme("test", 4, True, 64)
    want = solve_with(weight, statistics, scheme, DEFAULTS)
    found = solve_with(weight, statistics, scheme, replace(DEFAULTS, block_columns=block_columns))
    assert torch.equal(found.codes.codes, want.codes.codes)


def test_three_inputs_by_hand() -> None:
    """Step .1, zero 8. .75 is cut to .7, the others move to make up: -.36 becomes -.3 and not -.4, .26 becomes .2 and not .3."""
    hessian = np.array([[2, 1.8, 0.4], [1.8, 2, 0.6], [0.4, 0.6, 1]], np.float32)
    weight = torch.tensor([[0.75, -0.36, 0.26]])
    statistics = statistics_from(hessian)
    factor = hessian_factor(statistics, LEGACY)
    assert factor is not None
    upper = torch.tensor([[1.60512, -1.50989, 0.25956], [0, 0.77555, -0.4577], [0, 0, 0.99177]])
    assert torch.allclose(factor.upper, upper, atol=1e-5) and factor.damp == pytest.approx(0.01)
    found = solve_with(weight, statistics, QuantScheme("test", 4), LEGACY)
    assert found.codes.codes.t().tolist() == [[15, 5, 10]]
    assert found.codes.scale.tolist() == [[pytest.approx(0.1)]] and found.codes.zero.tolist() == [[8]]
    off = found.values.t()[0] - weight[0]
    assert float(off @ torch.from_numpy(hessian) @ off) == pytest.approx(0.00308, abs=1e-5)


def test_act_order_by_hand() -> None:
    """Groups of four in the order of the diagonal: the even inputs come last."""
    hessian = np.diag(np.array([1, 8, 2, 7, 3, 6, 4, 5], np.float32))
    weight = torch.tensor([[1.0, 15.0, 2.0, 14.0, 3.0, 13.0, 4.0, 12.0]])
    options = replace(LEGACY, act_order=True)
    found = solve_with(weight, statistics_from(hessian), QuantScheme("test", 4, True, 4), options)
    assert found.codes.perm is not None and found.codes.perm.tolist() == [1, 3, 5, 7, 6, 4, 2, 0]
    assert found.codes.scale.flatten().tolist() == [1.0, pytest.approx(4 / 15)]
    static = solve_with(weight, statistics_from(hessian), QuantScheme("test", 4, True, 4), replace(options, static_groups=True))
    assert static.codes.perm is None and static.codes.scale.flatten().tolist() == [1.0, pytest.approx(13 / 15)]


def test_stored_permutation_gives_the_weight_back() -> None:
    """AutoGPTQ#201: act-order whose readers ignored the order gave gibberish."""
    weight, statistics = random_weight(40, 128), statistics_of(correlated_inputs(400, 128))
    options = SolverOptions(static_groups=False)
    scheme = QuantScheme("w4a16", 4, True, 32)
    result = quantize_gptq(weight, scheme, statistics, options)
    assert set(result.weight.parts()) == set(stored_scheme(scheme, options).leaves()) == {"qweight", "scales", "perm"}
    assert float((result.weight.dense(torch.float32) - weight).abs().max()) < 0.1
    assert result.output_sqnr_db is not None and result.output_sqnr_db > 25
    assert "perm" not in quantize_gptq(weight, scheme, statistics, DEFAULTS).weight.parts()
    assert not stored_scheme(replace(scheme, group_size=-1), options).act_order
    assert set(quantize_gptq(weight, replace(scheme, group_size=-1), statistics, options).weight.parts()) == {"qweight", "scales"}


@pytest.mark.parametrize("name", INTEGER_SCHEMES)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("static_groups", [False, True])
def test_outputs_are_nearer_than_after_rounding(name: str, act_order: bool, static_groups: bool) -> None:
    weight, statistics = random_weight(48, 256), replace(statistics_of(correlated_inputs(1000, 256)), tokens=None)  # inputs as they are
    scheme = replace(PRESETS[name], group_size=-1 if PRESETS[name].storage == "int8" else 64)
    options = SolverOptions(act_order=act_order, static_groups=static_groups)
    solved, rounded = quantize_gptq(weight, scheme, statistics, options), quantize_rtn(weight, scheme, statistics, options)
    assert solved.output_sqnr_db is not None and rounded.output_sqnr_db is not None
    assert solved.output_sqnr_db > rounded.output_sqnr_db + 3
    off = solved.weight.dense(torch.float64) - weight.double()
    hessian = statistics.hessian.double()
    direct = 10 * torch.log10(torch.trace(weight.double() @ hessian @ weight.double().t()) / torch.trace(off @ hessian @ off.t()))
    assert solved.output_sqnr_db == pytest.approx(float(direct), abs=0.02)


def test_outputs_on_real_tokens_are_what_is_measured() -> None:
    x = correlated_inputs(700, 96)
    weight, statistics = random_weight(32, 96), statistics_of(x)
    result = quantize_gptq(weight, QuantScheme("w4a16", 4, True, 32), statistics)
    y = x.double() @ weight.double().t()
    off = x.double() @ result.weight.dense(torch.float64).t() - y
    assert result.output_sqnr_db == pytest.approx(float(10 * torch.log10(y.square().sum() / off.square().sum())), abs=0.02)


def test_codes_belong_to_the_step_as_it_is_stored() -> None:
    """Each error is made up for by later weights, so codes of another step than the stored one would undo what was solved."""
    weight, statistics = random_weight(64, 128), statistics_of(correlated_inputs(500, 128))
    options = SolverOptions()
    scheme = QuantScheme("w4a16", 4, False, 32)
    solution = solve_with(weight, statistics, scheme, options)
    result = quantize_gptq(weight, scheme, statistics, options)
    assert result.weight.scales.dtype == torch.float16
    assert torch.equal(result.weight.dense(torch.float32), solution.values.t())


def test_int8_codes_by_hand() -> None:
    """The largest weight falls on 127.5 steps and is cut to 127."""
    weight = torch.tensor([[127.5, -127.5, 3.2, 0.0], [0.0, 0.0, 0.0, 0.0]])
    result = quantize_gptq(weight, PRESETS["w8a8"], statistics_from(np.eye(4, dtype=np.float32)), SolverOptions(clip=False))
    assert result.weight.qweight.dtype == torch.int8 and result.weight.qweight.tolist() == [[127, -128, 3, 0], [0, 0, 0, 0]]
    assert result.weight.scales.dtype == torch.float32 and float(result.weight.scales[0]) == 1.0


def test_modules_that_share_statistics_share_the_factor() -> None:
    statistics = statistics_of(correlated_inputs(300, 64))
    first = hessian_factor(statistics, DEFAULTS)
    assert hessian_factor(statistics, replace(DEFAULTS, clip=False)) is first
    assert hessian_factor(statistics, replace(DEFAULTS, act_order=False)) is not first
    assert hessian_factor(statistics.scaled(torch.full((64,), 2.0)), DEFAULTS) is not first


def test_wide_layers_are_factorized_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three copies of the Hessian in float64 would be 20 GB at 28,672 inputs."""
    x = correlated_inputs(1000, 192)
    exact = hessian_factor(statistics_of(x), DEFAULTS)
    monkeypatch.setattr("dspark.converters.quantizers.factor.MAX_WIDE_INPUTS", 100)
    narrow = hessian_factor(statistics_of(x), DEFAULTS)
    assert exact is not None and narrow is not None
    assert 0 < float((narrow.upper - exact.upper).norm() / exact.upper.norm()) < 1e-4


def test_rows_do_not_depend_on_how_they_are_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, statistics = random_weight(200, 64), statistics_of(correlated_inputs(300, 64))
    whole = quantize_gptq(weight, QuantScheme("w4a16", 4, True, 32), statistics)
    monkeypatch.setattr("dspark.converters.quantizers.integers._MAX_SLICE_BYTES", 1)
    sliced = quantize_gptq(weight, QuantScheme("w4a16", 4, True, 32), statistics)
    assert (whole.weight.dense(torch.float32) == sliced.weight.dense(torch.float32)).float().mean() > 0.999


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_solvers_run_in_inference_mode(method: str) -> None:
    """Calibration does; tensors made there may not be written from threads that do not know of it."""
    weight, statistics = random_weight(200, 64), statistics_of(correlated_inputs(300, 64))
    for name in ("w4a16", "w4a16-asym", "w8a8"):
        want = quantizer(method)(weight, PRESETS[name], statistics, DEFAULTS)
        with torch.inference_mode():
            found = quantizer(method)(weight.clone(), PRESETS[name], statistics_of(correlated_inputs(300, 64)), DEFAULTS)
            assert torch.equal(found.weight.qweight, want.weight.qweight)


# ------------------------------------------------------------------------------------------------------------------ what may go wrong


def indefinite(least: float) -> LayerStatistics:
    """A Hessian with the eigenvalues `least` and 2 - least and a diagonal of ones."""
    return statistics_from(np.array([[1, 1 - least], [1 - least, 1]], np.float32))


def test_damping_rises_until_the_hessian_can_be_factorized() -> None:
    """AutoGPTQ#98 and many others: a run of hours ended at one layer."""
    result = quantize_gptq(torch.randn(3, 2), QuantScheme("w8a16", 8), indefinite(-0.045))
    assert result.damp_used == pytest.approx(0.05) and result.notes == ("the Hessian could not be factorized 4 times; damping 0.05",)
    assert quantize_gptq(torch.randn(3, 2), QuantScheme("w8a16", 8), indefinite(0.5)).notes == ()


def test_a_singular_hessian_needs_no_more_than_the_damping() -> None:
    """Fewer tokens than inputs."""
    statistics = statistics_of(correlated_inputs(5, 64))
    result = quantize_gptq(random_weight(8, 64), QuantScheme("w4a16", 4, True, 32), statistics)
    assert result.notes == () and result.damp_used == 0.01
    undamped = quantize_gptq(random_weight(8, 64), QuantScheme("w4a16", 4, True, 32), statistics, SolverOptions(damp=0.0))
    assert undamped.damp_used == 0.01 and undamped.notes == ("the Hessian could not be factorized once; damping 0.01",)


def test_a_floor_comes_after_the_damping() -> None:
    factor = hessian_factor(indefinite(-1.05), DEFAULTS)
    assert factor is not None and factor.damp == pytest.approx(0.99 + 0.1) and factor.failures == 99 + 5


def test_what_cannot_be_factorized_is_rounded_and_said() -> None:
    weight = torch.randn(3, 2)
    result = quantize_gptq(weight, QuantScheme("w8a16", 8), indefinite(-3.0))
    assert result.notes == ("rounded to nearest: no damping makes the Hessian positive definite",)
    assert torch.equal(result.weight.qweight, quantize_rtn(weight, QuantScheme("w8a16", 8)).weight.qweight)
    broken = statistics_from(np.full((2, 2), np.nan, np.float32))
    assert quantize_gptq(weight, QuantScheme("w8a16", 8), broken).notes == result.notes


@pytest.mark.parametrize(("tokens", "words"), [(0, "no tokens reached this layer"), (3, "only 3 tokens reached this layer")])
def test_an_expert_without_tokens_is_rounded_and_said(tokens: int, words: str) -> None:
    """GPTQModel#991: experts that the calibration never chose."""
    accumulator = StatisticsAccumulator(64)
    accumulator.add(correlated_inputs(tokens, 64))
    weight, scheme = random_weight(8, 64), QuantScheme("w4a16", 4, True, 32)
    result = quantize_gptq(weight, scheme, accumulator.finish(), SolverOptions(min_tokens=4))
    assert result.notes == (f"rounded to nearest: {words}",)
    assert result.loss is None and result.damp_used is None
    assert quantize_gptq(weight, scheme).notes == ("rounded to nearest: no tokens reached this layer",)


def test_what_is_rounded_is_stored_like_its_neighbours() -> None:
    """An engine is written by the names of its scheme: an expert without tokens would have no permutation among those that have one."""
    weight, scheme, options = random_weight(8, 64), QuantScheme("w4a16", 4, True, 32), SolverOptions(static_groups=False)
    result = quantize_gptq(weight, scheme, None, options)
    assert set(result.weight.parts()) == set(stored_scheme(scheme, options).leaves())
    assert torch.equal(result.weight.dense(torch.float32), quantize_rtn(weight, scheme).weight.dense(torch.float32))


def test_dead_inputs_keep_their_weights() -> None:
    """AutoGPTQ sets them to zero; calibration may simply not have met what they are for."""
    x = correlated_inputs(300, 64)
    x[:, 7] = 0
    weight, statistics, scheme = random_weight(8, 64), statistics_of(x), QuantScheme("w8a16", 8, True, 32)
    kept = quantize_gptq(weight, scheme, statistics).weight.dense(torch.float32)[:, 7]
    assert float((kept - weight[:, 7]).abs().max()) < 2e-3
    assert not quantize_gptq(weight, scheme, statistics, replace(LEGACY)).weight.dense(torch.float32)[:, 7].any()
    silent = quantize_gptq(weight, scheme, statistics_of(torch.zeros(10, 64)))
    assert float((silent.weight.dense(torch.float32) - weight).abs().max()) < 2e-3


def test_the_scale_of_the_inputs_does_not_matter() -> None:
    """Damping is relative, dead inputs included."""
    x = correlated_inputs(300, 64)
    x[:, [3, 9]] = 0
    weight, scheme = random_weight(8, 64), QuantScheme("w4a16", 4, True, 32)
    small, large = (quantize_gptq(weight, scheme, statistics_of(x * scale)) for scale in (2**-10, 2**10))
    assert torch.equal(small.weight.qweight, large.weight.qweight)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_weights_that_are_not_finite_are_refused(method: str, value: float) -> None:
    weight = random_weight(8, 64)
    weight[2, 3] = value
    for name in ("w4a16", "w8a8", "fp8"):
        with pytest.raises(InputError, match="the weight has values that are not finite"):
            quantizer(method)(weight, PRESETS[name], statistics_of(correlated_inputs(300, 64)), DEFAULTS)


def test_schemes_that_do_not_fit_are_refused() -> None:
    statistics = statistics_of(correlated_inputs(300, 96))
    with pytest.raises(ValueError, match="64 does not divide 96 inputs"):
        quantize_gptq(random_weight(8, 96), QuantScheme("w4a16", 4, True, 64), statistics)
    with pytest.raises(ValueError, match="cross moments"):
        quantize_gptq(random_weight(8, 96), QuantScheme("w4a16", 4, True, 32), statistics, SolverOptions(gptaq_alpha=0.25))


# ------------------------------------------------------------------------------------------------------------------------------ GPTAQ


def drifted(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of the quantized and of the full model."""
    full = correlated_inputs(600, width)
    return full + 0.2 * correlated_inputs(600, width, seed=8), full


def test_gptaq_is_the_published_recurrence() -> None:
    quantized, full = (x.double() for x in drifted(256))
    hessian = (2 / 600 * quantized.t() @ quantized).numpy()
    cross = (2 / 600 * (full - quantized).t() @ quantized).numpy()
    weight = random_weight(30, 256).double()
    wanted = reference.gptaq(weight.numpy(), hessian, cross, bits=4, size=32, alpha=0.25)
    options = replace(LEGACY, act_order=True, static_groups=True, gptaq_alpha=0.25)
    found = solve_with(weight, statistics_from(hessian, cross), QuantScheme("test", 4, True, 32), options)
    assert np.abs(found.values.t().numpy() - wanted).max() < 1e-12
    plain = solve_with(weight, statistics_from(hessian, cross), QuantScheme("test", 4, True, 32), replace(options, gptaq_alpha=None))
    assert not torch.equal(plain.codes.codes, found.codes.codes)


def test_gptaq_without_drift_is_gptq() -> None:
    x = correlated_inputs(400, 64)
    weight, scheme = random_weight(16, 64), QuantScheme("w4a16", 4, True, 32)
    statistics = replace(statistics_of(x), cross=torch.zeros(64, 64))
    asymmetric = quantize_gptq(weight, scheme, statistics, SolverOptions(gptaq_alpha=0.25))
    assert torch.equal(asymmetric.weight.qweight, quantize_gptq(weight, scheme, statistics).weight.qweight)


def test_gptaq_brings_the_outputs_nearer_to_those_of_the_full_model() -> None:
    """What the quantized model's inputs give should be what the full one's gave."""
    quantized, full = drifted(128)
    weight, scheme = random_weight(64, 128), QuantScheme("w4a16", 4, True, 32)
    statistics = statistics_of(quantized, full)
    want = full.double() @ weight.double().t()

    def distance(alpha: float | None) -> float:
        dense = quantize_gptq(weight, scheme, statistics, SolverOptions(gptaq_alpha=alpha)).weight.dense(torch.float64)
        return float((quantized.double() @ dense.t() - want).norm() / want.norm())

    assert distance(0.25) < 0.97 * distance(None)
