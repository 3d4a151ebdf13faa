"""The gate: what it lets pass, what it says when it does not, and that its remedies are flags."""

from __future__ import annotations

import math
import shlex

import pytest

from dspark.converters.quality.gate import QualityLimits, check, excess, violations
from dspark.converters.quality.measure import Comparison, Scores
from dspark.converters.quality.remedy import Asked
from dspark.runtime.spec.errors import QualityError
from dspark.runtime.spec.quant import QuantConfig, QuantScheme

EVEN = (20, 20, 20, 20)
"""Signal to error of the layers in dB: none stands out."""


def comparison(kl: float = 0.3, increase: float = 25.0) -> Comparison:
    """With this mean KL in nats and this increase of perplexity in percent."""
    base = Scores(100, 2.0)
    return Comparison(base, Scores(100, 2.0 + math.log1p(increase / 100)), kl, 0.01, 1.0, 2.0, 0.8, 0.01)


def layers(*errors: float, key: str = "output_sqnr_db") -> dict[str, dict[str, float]]:
    """One down_proj per decoder layer with these signal-to-error ratios in dB."""
    return {f"model.layers.{i}.mlp.down_proj": {key: error, "bytes": 10} for i, error in enumerate(errors)}


def refused(
    limits: QualityLimits,
    scheme: QuantScheme | None,
    errors: tuple[float, ...] = (20, 20, 20, 20),
    outcome: str = "nothing was published",
    **asked: object,
) -> QualityError:
    """asked: fields of `Asked` beside the default group size 64."""
    quant = None if scheme is None else QuantConfig(scheme)
    with pytest.raises(QualityError) as raised:
        check(comparison(), limits, quant, layers(*errors), Asked(64, **asked), outcome)  # type: ignore[arg-type]
    return raised.value


def remedy(limit: float, scheme: QuantScheme, errors: tuple[float, ...] = EVEN, **more: object) -> str:
    """The flags that are proposed at a KL of 0.3."""
    return refused(QualityLimits(max_kl=limit), scheme, errors, **more).hint.partition("quantize again with: ")[2]


W2 = QuantScheme("w2a16", 2, group_size=-1)
W4 = QuantScheme("w4a16", 4, group_size=-1)
GPTQ4 = QuantScheme("w4a16", 4, group_size=64, method="gptq")


@pytest.mark.parametrize("limits", [QualityLimits(), QualityLimits(0.3), QualityLimits(None, 25.0 + 1e-9), QualityLimits(0.31, 26)])
def test_within_the_limits_nothing_is_raised(limits: QualityLimits) -> None:
    check(comparison(), limits, QuantConfig(W4), layers(20))
    assert bool(limits) == (limits != QualityLimits())


def test_the_line_names_values_limits_layers_and_remedy() -> None:
    error = refused(QualityLimits(0.125, 5), QuantScheme("w2a16", 2, group_size=64, method="gptq"), (20, 3.5, 20, 11, 12))
    assert error.exit_code == 6
    assert error.one_line() == (
        "quality gate: mean KL to the baseline is 0.3 nats, --max-kl is 0.125; "
        "perplexity is 25 % above the baseline's, --max-ppl-increase is 5; "
        "largest error of outputs: model.layers.1.mlp.down_proj (-3.5 dB), model.layers.3.mlp.down_proj (-11.0 dB), "
        "model.layers.4.mlp.down_proj (-12.0 dB); nothing was published; "
        "quantize again with: --scheme w4a16 --group-size 64 --method gptq --calibration FILE"
    )


def test_one_broken_limit_is_enough_and_only_it_is_named() -> None:
    error = refused(QualityLimits(0.125, 30), W4)
    assert "mean KL" in error.message and "perplexity" not in error.message
    assert [v.flag for v in violations(comparison(), QualityLimits(0.5, 10))] == ["--max-ppl-increase"]


def test_what_is_not_a_number_breaks_every_limit() -> None:
    broken = violations(comparison(kl=math.nan, increase=math.inf), QualityLimits(1e9, 1e9))
    assert len(broken) == 2 and {excess(violation) for violation in broken} == {math.inf}


def test_how_far_over_a_limit_a_value_is() -> None:
    """Perplexity's own increase is exponential in the error: 25 % over 5 % is not five times but log 1.25 / log 1.05 times."""
    kl, increase = violations(comparison(), QualityLimits(0.1, 5))
    assert excess(kl) == pytest.approx(3) and excess(increase) == pytest.approx(math.log(1.25) / math.log(1.05))
    assert excess(violations(comparison(), QualityLimits(0.0))[0]) == math.inf


@pytest.mark.parametrize(
    ("scheme", "limit", "flags"),
    [
        (W2, 0.25, "--scheme w2a16 --group-size 64 --method gptq --calibration FILE"),
        (W2, 0.05, "--scheme w4a16 --group-size 64 --method gptq --calibration FILE"),
        (QuantScheme("w3a16-asym", 3, False, 32, "awq"), 0.12, "--scheme w4a16-asym --group-size 32 --method awq --calibration FILE"),
        (W4, 0.2, "--scheme w4a16 --group-size 64 --method gptq --calibration FILE"),
        (W4, 0.14, "--scheme w4a16 --group-size 32 --method gptq --calibration FILE"),
        (W4, 0.05, "--scheme w8a16"),
        (W4, 0.0, "--scheme w8a16"),
        (GPTQ4, 0.1, "--scheme w8a16"),
        (QuantScheme("w8a8", 8, storage="int8"), 0.25, "--scheme w8a8 --method smoothquant-gptq --calibration FILE"),
        (QuantScheme("w8a8", 8, storage="int8"), 0.1, "--scheme w8a16"),
        (QuantScheme("w8a8", 8, storage="int8", method="smoothquant"), 0.29, "--scheme w8a16"),
        (QuantScheme("w8a8", 8, storage="int8", method="smoothquant-gptq"), 0.25, "--scheme w8a16"),
        (QuantScheme("fp8", 8, storage="fp8"), 0.25, "--scheme fp8 --method gptq --calibration FILE"),
        (QuantScheme("fp8", 8, storage="fp8", method="gptq"), 0.25, "--scheme w8a16"),
        (QuantScheme("w8a16", 8), 0.25, "--scheme w8a16 --group-size 64"),
    ],
)
def test_the_smallest_engine_that_is_estimated_to_pass(scheme: QuantScheme, limit: float, flags: str) -> None:
    assert remedy(limit, scheme) == flags


def test_few_bad_layers_stay_in_8_bits() -> None:
    """Layer 3 has 100 times the power of the others' error: without it a twelfth is left."""
    assert remedy(0.1, GPTQ4, (20, 20, 20, 0, 20, 20, 20, 20, 20, 20)) == (
        "--scheme w4a16 --group-size 64 --method gptq --calibration FILE --rule 'model.layers.3.*=w8a16'"
    )
    assert "--rule" not in remedy(0.1, GPTQ4, (20, 20, 20, 20, 20, 20))


def test_what_the_user_typed_is_typed_again() -> None:
    flags = remedy(0.2, W4, rules=("model.layers.0.*=dense",), calibration="my text.txt")
    assert shlex.split(flags) == [
        *("--scheme", "w4a16", "--group-size", "64", "--method", "gptq"),
        *("--calibration", "my text.txt", "--rule", "model.layers.0.*=dense"),
    ]


@pytest.mark.parametrize(
    ("limit", "flags"),
    [
        (0.25, "--scheme w4a16 --method gptq --target-bpw 4.2 --calibration FILE"),
        (0.02, "--scheme w4a16 --method gptq --target-bpw 6.3 --calibration FILE"),
        (0.001, "--scheme w8a16"),
        (0.0, "--scheme w8a16"),
    ],
)
def test_a_target_of_bits_is_raised(limit: float, flags: str) -> None:
    """By a bit for each factor of 4, with half as much again for the margin: 0.3 / 0.25 * 1.5 = 1.8 is 0.42 of a bit."""
    assert remedy(limit, GPTQ4, target_bpw=3.75 if limit == 0.25 else 4.0) == flags


def test_a_target_of_bits_names_other_groups_and_a_better_method() -> None:
    """0.3 / 0.25 * 1.5 times GPTQ's 0.7 is 1.26: 0.17 of a bit. The groups are those of the layers with few bits."""
    rounded = QuantScheme("w4a16-asym", 4, False, 32)
    assert remedy(0.25, rounded, target_bpw=4.0) == (
        "--scheme w4a16-asym --group-size 32 --method gptq --target-bpw 4.2 --calibration FILE"
    )


def test_a_head_of_few_bits_is_proposed_in_8() -> None:
    assert remedy(0.1, GPTQ4, head_scheme="w4a16") == "--scheme w8a16 --head-scheme w8a16"
    assert remedy(0.1, GPTQ4, head_scheme="w8a16-asym") == "--scheme w8a16 --head-scheme w8a16-asym"
    best = QuantScheme("w8a16", 8, group_size=64)
    assert remedy(0.1, best, head_scheme="w4a16") == "--scheme w8a16 --group-size 64 --head-scheme w8a16"


def test_inputs_in_8_bits_stay_so() -> None:
    rounded = QuantScheme("fp8", 8, storage="fp8", inputs="dynamic")
    assert remedy(0.25, rounded, fp8_inputs="dynamic") == "--scheme fp8 --method gptq --fp8-inputs dynamic --calibration FILE"
    assert remedy(0.01, rounded, fp8_inputs="dynamic") == "--scheme w8a16"


def test_a_calibrated_cache_and_what_stays_dense_are_typed_again() -> None:
    assert remedy(0.1, GPTQ4, kv_cache_dtype="int8", ignore=("*.o_proj",)) == (
        "--scheme w8a16 --kv-cache-dtype int8 --calibration FILE --ignore '*.o_proj'"
    )


def test_where_nothing_is_more_accurate_the_limit_is_named() -> None:
    error = refused(QualityLimits(0.125, 5), QuantScheme("w8a16", 8, group_size=64))
    assert error.hint == "nothing was published; type --max-kl 0.3 --max-ppl-increase 25 to accept it, or keep the model as it is"
    assert refused(QualityLimits(0.125), None, outcome="").hint.startswith("type --max-kl 0.3 to accept it")
    check(comparison(), QualityLimits(0.3, 25 + 1e-9), None, {})


def test_errors_of_weights_are_used_where_outputs_were_not_measured() -> None:
    with pytest.raises(QualityError, match=r"largest error of weights: model.layers.1.mlp.down_proj \(-10.0 dB\)"):
        check(comparison(), QualityLimits(0.1), QuantConfig(W4), layers(20, 10, key="sqnr_db"), Asked(64))
    with pytest.raises(QualityError) as raised:
        check(comparison(), QualityLimits(0.1), QuantConfig(W4), {}, Asked(64))
    assert "largest error" not in raised.value.message
