"""AWQ without tokens, against a slow search that runs the linear over them (the listings of AutoAWQ's method, written out plainly)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dspark.converters.quantizers import awq, awq_errors
from dspark.converters.quantizers.awq import candidate_scales, quantize_awq, search_scales, weight_magnitude
from dspark.converters.quantizers.awq_errors import Reader, clip_search, output_errors
from dspark.converters.quantizers.base import DEFAULTS
from dspark.converters.quantizers.gptq import quantize_gptq
from dspark.converters.quantizers.rtn import quantize_rtn
from dspark.converters.quantizers.statistics import LayerStatistics, StatisticsAccumulator
from dspark.converters.scaling.groups import VALUE_OUT, ScalingGroup
from dspark.kernels.packing import unpack_codes
from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.spec.quant import PRESETS, QuantScheme, preset

GROUP = 32


def scheme(name: str = "w4a16", group_size: int = GROUP) -> QuantScheme:
    return replace(preset(name), group_size=group_size)


def statistics_of(x: torch.Tensor) -> LayerStatistics:
    sums = StatisticsAccumulator(x.shape[1])
    sums.add(x)
    return sums.finish()


def inputs(tokens: int = 300, channels: int = 128, seed: int = 0) -> torch.Tensor:
    """Related channels of very different magnitudes, a few of them large, as behind a norm."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, channels, generator=generator) @ (
        torch.eye(channels) + 0.1 * torch.randn(channels, channels, generator=generator)
    )
    return mixed * torch.exp(torch.randn(channels, generator=generator) * 1.2)


def weights(*outputs: int, channels: int = 128, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, channels, generator=generator) * 0.05 for count in outputs]


# ------------------------------------------------------------------------------------------------- the slow search, over tokens


def stored_step(low: float, high: float, s: QuantScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """The step of a range as it is stored, and its zero point."""
    low, high = min(low, 0.0), max(high, 0.0)
    if s.symmetric:
        low, high = -max(-low, high), max(-low, high)
    step = torch.tensor((high - low) / (2**s.weight_bits - 1)).half().float()
    return step, torch.tensor(2.0 ** (s.weight_bits - 1)) if s.symmetric else torch.round(-low / step).clamp(max=2**s.weight_bits - 1)


def slow_rounding(w: torch.Tensor, s: QuantScheme, limits: torch.Tensor | None = None) -> torch.Tensor:
    """w [N, K] rounded group by group and expanded again; limits [N, G]: of each group's range."""
    out = torch.empty_like(w)
    for n in range(w.shape[0]):
        for g, first in enumerate(range(0, w.shape[1], s.group_size)):
            part = w[n, first : first + s.group_size]
            kept = part if limits is None else part.clamp(-limits[n, g], limits[n, g])
            step, zero = stored_step(float(kept.min()), float(kept.max()), s)
            codes = (torch.round(part / step) + zero).clamp(0, 2**s.weight_bits - 1)
            out[n, first : first + s.group_size] = (codes - zero) * step
    return out


def slow_search(
    ws: list[torch.Tensor], x: torch.Tensor, s: QuantScheme, duo: bool, candidates: torch.Tensor
) -> tuple[torch.Tensor, float, list[float]]:
    """Every ratio tried by running the linears over all tokens.

    candidates [20, K]: the scales under test. They must be the formula's to the last bits, and are then tried as they are: a step that lies
    between two float16 numbers falls to either side with the last bit of its scale, and takes a whole group along.
    """
    together = torch.cat(ws)
    sizes = together.abs().reshape(-1, s.group_size)
    w_mean = (sizes / (sizes.max(1, keepdim=True).values + 1e-6)).reshape(together.shape).mean(0)
    x_mean = x.abs().mean(0)
    wanted = [x @ w.t() for w in ws]
    losses, tried = [], []
    for i in range(20):
        r = i / 20
        scale = (x_mean**r / (w_mean ** (1 - r) + 1e-4) if duo else x_mean**r).clamp(min=1e-4)
        scale = scale / (scale.max() * scale.min()).sqrt()
        scale[~scale.isfinite()] = 1
        torch.testing.assert_close(candidates[i], scale, rtol=1e-5, atol=0)
        scale = candidates[i]
        got = [x @ (slow_rounding(w * scale, s) / scale).t() for w in ws]
        losses.append(sum(float((a - b).square().sum(1).mean()) for a, b in zip(got, wanted, strict=True)))
        tried.append(scale)
    best = min(range(20), key=losses.__getitem__)
    return tried[best], best / 20, losses


def slow_clip(w: torch.Tensor, x: torch.Tensor, s: QuantScheme) -> torch.Tensor:
    """Every limit of every group tried on the group's part of the dot products with all tokens [N, G]."""
    groups = w.shape[1] // s.group_size
    best = torch.empty(len(w), groups)
    for g in range(groups):
        part, seen = w[:, g * s.group_size : (g + 1) * s.group_size], x[:, g * s.group_size : (g + 1) * s.group_size]
        for n in range(len(w)):
            smallest = float("inf")
            for i in range(10):
                limit = part[n].abs().max() * (1 - i / 20)
                rounded = slow_rounding(part[n, None], s, limit[None, None])[0]
                loss = float((seen @ (rounded - part[n])).square().mean())
                if loss < smallest:
                    smallest, best[n, g] = loss, limit
    return best


# ------------------------------------------------------------------------------------------------------------- scales


@pytest.mark.parametrize("name", ["w4a16", "w4a16-asym"])
@pytest.mark.parametrize("duo", [True, False])
def test_the_search_equals_the_one_over_tokens(name: str, duo: bool) -> None:
    x, ws = inputs(), weights(24, 8)
    observed = statistics_of(x)
    readers = [Reader(w, scheme(name), observed, clip=False) for w in ws]
    candidates = candidate_scales(observed.mean_abs, weight_magnitude(readers) if duo else None)
    scales, ratio, losses = slow_search(ws, x, scheme(name), duo, candidates)
    ours = search_scales("norm", readers, observed, duo=duo, exhaustive=True)
    assert list(ours.losses.values()) == pytest.approx(losses, rel=1e-3)
    assert ours.ratio == ratio and 0 < ratio < 0.95
    torch.testing.assert_close(ours.scales, scales, rtol=1e-5, atol=0)
    assert ours.loss == pytest.approx(min(losses), rel=1e-3) and ours.loss < ours.unscaled_loss


@pytest.mark.parametrize("name", ["w4a16", "w4a16-asym", "w3a16", "w2a16-asym"])
@pytest.mark.parametrize("clip", [True, False])
def test_the_loss_is_that_of_the_codes(name: str, clip: bool) -> None:
    """The search foresees what solving makes of the scaled weights, over all tokens: nothing else may be what it compares."""
    x, ws = inputs(), weights(24, 8)
    observed, options = statistics_of(x), replace(DEFAULTS, clip=clip)
    result = search_scales("norm", [Reader(w, scheme(name), observed, clip) for w in ws], observed)
    for scales, foreseen in ((result.scales, result.loss), (torch.ones(128), result.unscaled_loss)):
        loss = 0.0
        for w in ws:
            dense = quantize_awq(w * scales, scheme(name), observed.scaled(scales), options).weight.dense(torch.float32) / scales
            loss += float((x @ (dense - w).t()).square().sum(1).mean())
        assert foreseen == pytest.approx(loss, rel=2e-3)
    assert result.loss < result.unscaled_loss


def test_few_candidates_are_computed_in_full() -> None:
    """The estimate sorts out most, and hardly ever the best."""
    regrets = []
    for seed in range(8):
        observed, (w,) = statistics_of(inputs(seed=seed)), weights(48, seed=seed)
        readers = [Reader(w, scheme(), observed)]
        few, every = (search_scales("norm", readers, observed, exhaustive=exhaustive) for exhaustive in (False, True))
        assert len(few.losses) <= awq.FINALISTS and few.losses.items() <= every.losses.items()
        regrets.append(few.loss / every.loss - 1)
    assert sum(regrets) / len(regrets) < 0.02


def test_large_ratios_are_found_too() -> None:
    """Only the first half of the ratios is looked at, unless the best one is near its end. Here the weights of the large channels are so
    small that they can grow by all that the activations suggest."""
    x, (w,) = torch.randn(300, 128, generator=torch.Generator().manual_seed(0)), weights(24)
    x[:, ::32] *= 10
    w[:, ::32] *= 0.1
    observed = statistics_of(x)
    readers = [Reader(w, scheme(), observed)]
    few, every = (search_scales("norm", readers, observed, duo=False, exhaustive=exhaustive) for exhaustive in (False, True))
    assert few.ratio == every.ratio and every.ratio is not None and every.ratio > 0.5


def test_formula_by_hand() -> None:
    """mean |x| 1 and 4, magnitudes 1 and 0.5, ratio 0.5: 0.9999 and 2.82803, over the root of their product."""
    scales = awq.candidate_scales(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 0.5]))[10]
    assert scales.tolist() == pytest.approx([0.59462, 1.68176], abs=1e-5)
    plain = awq.candidate_scales(torch.tensor([1.0, 4.0]), None)
    assert plain[0].tolist() == [1, 1] and plain[10].tolist() == pytest.approx([2**-0.5, 2**0.5])


def test_magnitude_by_hand() -> None:
    """Each |w| over the largest of its group, then the mean over rows of all readers."""
    first, second = torch.tensor([[1.0, -2.0, 4.0, 1.0]]), torch.tensor([[2.0, 1.0, 0.0, 0.0]])
    observed = statistics_of(torch.ones(3, 4))
    found = awq.weight_magnitude([Reader(w, scheme(group_size=2), observed) for w in (first, second)])
    assert found.tolist() == pytest.approx([0.75, 0.75, 0.5, 0.125], abs=1e-5)


@pytest.mark.parametrize("name", [name for name, found in PRESETS.items() if found.storage == "wna16"])
@pytest.mark.parametrize("seed", range(4))
def test_scaling_is_never_worse_than_none(name: str, seed: int) -> None:
    """AutoAWQ has no candidate without scales, and none of its own has to be better."""
    x = inputs(seed=seed) if seed else torch.randn(200, 128)  # equal channels: little to gain
    observed, (w,) = statistics_of(x), weights(40, seed=seed)
    result = search_scales("norm", [Reader(w, scheme(name), observed)], observed)

    def loss(scales: torch.Tensor) -> float:
        dense = quantize_awq(w * scales, scheme(name), observed.scaled(scales)).weight.dense(torch.float32) / scales
        return float((x @ (dense - w).t()).square().sum(1).mean())

    assert loss(result.scales) <= loss(torch.ones(128)) * (1 + 1e-3)


def test_no_scaling_is_kept_where_no_ratio_is_better() -> None:
    """Eighths from -1 to 7/8 are exact as they are."""
    w = torch.arange(-8.0, 8.0).repeat(2)[None] / 8
    observed = statistics_of(inputs(channels=32))
    result = search_scales("norm", [Reader(w, scheme("w4a16-asym"), observed)], observed)
    assert result.ratio is None and result.scales.tolist() == [1.0] * 32
    assert result.loss == result.unscaled_loss == 0 and min(result.losses.values()) > 0


def test_nothing_that_is_given_changes() -> None:
    """AutoAWQ's snapshot of weights on the CPU is an alias of them, which the search then scales in place: it finds ratio 0."""
    x, ws = inputs(), weights(24, 8)
    observed = statistics_of(x)
    before = [tensor.clone() for tensor in (*ws, observed.hessian, observed.mean_abs)]
    search_scales("norm", [Reader(w, scheme(), observed) for w in ws], observed)
    quantize_awq(ws[0], scheme(), observed)
    assert all(torch.equal(old, new) for old, new in zip(before, (*ws, observed.hessian, observed.mean_abs), strict=True))


def test_scales_of_shared_heads_are_legal() -> None:
    group = ScalingGroup(VALUE_OUT, "v", ("o",), "o", 128, repeats=2, head_dim=32)
    observed = statistics_of(inputs())
    result = search_scales("v", [Reader(weights(16)[0], scheme(), observed, clip=False)], observed, group.legal_scales)
    assert result.ratio is not None and torch.equal(result.scales, group.legal_scales(result.scales))
    assert len(set(result.scales.tolist())) > 32


def test_each_expert_counts_by_its_own_tokens() -> None:
    """The sum over experts is the one over tokens: an expert that half of the tokens reach weighs half."""
    x = inputs(400)
    whole, half = statistics_of(x), statistics_of(x[:200])
    first, second = weights(16, 16)
    alone = [search_scales("norm", [Reader(w, scheme(), own)], own, exhaustive=True) for w, own in ((first, whole), (second, half))]
    readers = [Reader(first, scheme(), whole), Reader(second, scheme(), half)]
    both = output_errors(readers, torch.ones(1, 128), 400)
    assert float(both) == pytest.approx(alone[0].unscaled_loss + alone[1].unscaled_loss / 2, rel=1e-5)


def test_an_expert_without_tokens_says_nothing() -> None:
    observed, empty = statistics_of(inputs()), StatisticsAccumulator(128).finish()
    reached, unreached = weights(16, 16)
    with_it = search_scales("norm", [Reader(reached, scheme(), observed), Reader(unreached, scheme(), empty)], observed)
    assert torch.equal(with_it.scales, search_scales("norm", [Reader(reached, scheme(), observed)], observed).scales)
    alone = search_scales("up", [Reader(unreached, scheme(), empty)], empty)
    assert alone.ratio is None and alone.losses == {} and alone.scales.tolist() == [1.0] * 128


def test_a_dead_channel_keeps_its_weights() -> None:
    """By the formula it would get 1e-4: its weights would all round to zero, and the norm before it grow ten thousandfold."""
    x = inputs()
    x[:, 5] = 0
    observed = statistics_of(x)
    candidates = awq.candidate_scales(observed.mean_abs, torch.full((128,), 0.4))
    assert bool((candidates[:, 5] == 1).all()) and bool((candidates > 0).all())
    assert awq.candidate_scales(torch.zeros(4), torch.ones(4)).tolist() == [[1.0] * 4] * 20


def test_values_that_are_not_finite_leave_their_channel_alone() -> None:
    scales = awq.candidate_scales(torch.tensor([1.0, float("inf"), 2.0]), torch.tensor([0.5, 0.5, 0.5]))
    assert bool(scales.isfinite().all()) and bool((scales > 0).all())


def test_no_finite_error_is_an_error() -> None:
    """AutoAWQ #600: a search whose losses are all NaN must not go on with whatever scales it has."""
    observed = statistics_of(inputs())
    broken = replace(observed, hessian=torch.full((128, 128), float("nan")))
    with pytest.raises(InputError, match=r"no finite error for the scales of model.layers.3.input_layernorm"):
        search_scales("model.layers.3.input_layernorm", [Reader(weights(16)[0], scheme(), broken)], observed)


def test_losses_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    observed, (w,) = statistics_of(inputs()), weights(300)
    whole = search_scales("norm", [Reader(w, scheme(), observed)], observed)
    monkeypatch.setattr(awq_errors, "_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(awq_errors, "_STRIP", 50)
    pieces = search_scales("norm", [Reader(w, scheme(), observed)], observed)
    assert pieces.ratio == whole.ratio and pieces.loss == pytest.approx(whole.loss, rel=1e-5)


# --------------------------------------------------------------------------------------------------------------- clips


@pytest.mark.parametrize("name", ["w4a16", "w4a16-asym"])
def test_limits_equal_those_over_tokens(name: str) -> None:
    x, (w,) = inputs(), weights(12)
    w = w**3 * 400  # heavy tails, where limits pay
    groups = w.t().contiguous().unflatten(0, (-1, GROUP))
    found = clip_search(scheme(name), statistics_of(x))(groups, torch.ones(128 // GROUP, GROUP)).t()
    wanted = slow_clip(w, x, scheme(name))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    share = found / w.unflatten(1, (-1, GROUP)).abs().amax(-1)
    assert len({round(float(value), 2) for value in share.flatten()}) > 3


def test_codes_are_those_of_the_clipped_weight() -> None:
    x, (w,) = inputs(), weights(20)
    w = w**3 * 400
    for name in ("w4a16", "w4a16-asym"):
        observed = statistics_of(x)
        result = quantize_awq(w, scheme(name), observed)
        limits = slow_clip(w, x, scheme(name))
        assert torch.equal(result.weight.dense(torch.float32), slow_rounding(w, scheme(name), limits))
        error = result.weight.dense(torch.float32) - w
        signal, noise = (x @ w.t()).square().sum(), (x @ error.t()).square().sum()
        assert result.output_sqnr_db == pytest.approx(float(10 * (signal / noise).log10()), abs=0.02)
        assert result.sqnr_db == pytest.approx(float(10 * (w.square().sum() / error.square().sum()).log10()), abs=0.02)


def test_without_clipping_groups_keep_their_range() -> None:
    w, observed, whole = weights(16)[0] ** 3 * 400, statistics_of(inputs()), replace(DEFAULTS, clip=False)
    scales = quantize_awq(w, scheme(), observed, whole).weight.scales
    assert torch.equal(scales, quantize_rtn(w, scheme(), None, whole).weight.scales)
    assert not torch.equal(scales, quantize_awq(w, scheme(), observed).weight.scales)


def test_without_tokens_it_rounds_and_says_so() -> None:
    (w,) = weights(16)
    for nothing in (None, StatisticsAccumulator(128).finish()):
        result = quantize_awq(w, scheme(), nothing)
        assert torch.equal(result.weight.qweight, quantize_rtn(w, scheme()).weight.qweight)
        assert result.notes == ("rounded to nearest: no tokens reached this layer",)


def test_groups_of_zeros_stay_zero() -> None:
    """InternLM/lmdeploy #1786: a group without any weight makes a step of zero, and a scale of NaN."""
    (w,) = weights(8)
    w[1], w[2, :GROUP] = 0, 0
    observed = statistics_of(inputs())
    assert search_scales("norm", [Reader(w, scheme(), observed)], observed).scales.isfinite().all()
    dense = quantize_awq(w, scheme(), observed).weight.dense(torch.float32)
    assert bool((dense[1] == 0).all() and (dense[2, :GROUP] == 0).all() and dense.isfinite().all())


def test_one_group_for_all_inputs() -> None:
    observed, (w,) = statistics_of(inputs()), weights(8)
    whole = scheme(group_size=-1)
    assert search_scales("norm", [Reader(w, whole, observed)], observed).loss > 0
    result = quantize_awq(w, whole, observed)
    assert result.weight.scales.shape == (1, 8)
    assert int(unpack_codes(result.weight.qweight, 4, 128).max()) == 15


def test_a_scheme_without_codes_is_refused() -> None:
    with pytest.raises(UsageError, match="--method awq chooses integer codes"):
        quantize_awq(weights(8)[0], QuantScheme("fp8", 8, storage="fp8", block=(-1, -1)))


def test_scales_go_before_gptq_too() -> None:
    """Folding changes weights and statistics alike, so that the solver sees an ordinary layer; it loses far less than rounding does."""
    x, (w,) = inputs(600, seed=3), weights(48, seed=3)
    observed = statistics_of(x)
    result = search_scales("norm", [Reader(w, scheme(), observed)], observed)

    def loss(solver, scales: torch.Tensor) -> float:
        dense = solver(w * scales, scheme(), observed.scaled(scales)).weight.dense(torch.float32) / scales
        return float((x @ (dense - w).t()).square().sum(1).mean())

    assert loss(quantize_gptq, result.scales) < 0.5 * min(result.loss, loss(quantize_awq, result.scales))
