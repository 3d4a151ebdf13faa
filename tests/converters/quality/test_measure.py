"""Perplexity and divergences: by hand on a head of two tokens, and against all logits at once on small models."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_runs import tiny_engine

from dspark.converters.quality import measure
from dspark.converters.quality.measure import Comparison, FinalStates, ScoredTokens, compare, final_states, percentile, score
from dspark.runtime.execution.loader import EngineWeights, choose_kernels, load_model
from dspark.runtime.execution.logits import logits_for
from dspark.runtime.models.decoder import Head
from dspark.runtime.spec.errors import QualityError, UsageError
from dspark.runtime.spec.manifest import load_manifest

SAMPLES = [[5, 9, 200, 31, 7, 88, 12, 3], [17, 4], [40], [6, 250, 19, 77, 301]]


class FakeHead(Head):
    """States are the logits themselves."""

    def __init__(self, vocab_size: int) -> None:
        self.config = type("Config", (), {"vocab_size": vocab_size})()  # type: ignore[assignment]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def states(probabilities: list[list[float]]) -> FinalStates:
    return FinalStates(torch.tensor(probabilities).log(), FakeHead(len(probabilities[0])))


def walked(engine: Path, dtype: str | None = None) -> FinalStates:
    manifest = load_manifest(engine)
    kernels = choose_kernels(manifest.model, dtype)
    weights = EngineWeights(engine, manifest, kernels.facts.dtype, "cpu")
    return final_states(manifest.model, manifest.quant, weights, kernels, SAMPLES)


BASE = [[0.5, 0.5], [0.25, 0.75], [0.9, 0.1], [0.5, 0.5]]
OTHER = [[0.25, 0.75], [0.25, 0.75], [0.1, 0.9], [0.5, 0.5]]
TOKENS = [[0, 1, 1], [0]]
"""Scored: token 1 after row 0, token 1 after row 1; the last row of a sample has no next token."""


def test_two_tokens_by_hand() -> None:
    found = compare(states(BASE), states(OTHER), TOKENS)
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)  # of row 0; row 1 is equal
    assert found.baseline.num_tokens == 2
    assert found.baseline.perplexity == pytest.approx(1 / math.sqrt(0.5 * 0.75))
    assert found.candidate.perplexity == pytest.approx(1 / math.sqrt(0.75 * 0.75))
    assert found.ppl_increase == pytest.approx(100 * (math.sqrt(0.5 / 0.75) - 1))
    assert found.mean_kl == pytest.approx(kl / 2)
    assert found.max_kl == pytest.approx(kl)
    assert found.p99_kl == pytest.approx(0.99 * kl)  # linear between 0 and kl
    assert found.mean_kl_se is None and found.ppl_increase_se is None
    assert score(states(OTHER), TOKENS) == found.candidate


def test_agreement_by_hand() -> None:
    """Rows 0, 1, 2 are scored; the likeliest tokens are 0 0, 1 1 and 0 1 (a tie goes to the first)."""
    found = compare(states([[0.6, 0.4], *BASE[1:]]), states([[0.7, 0.3], *OTHER[1:]]), [[0, 0, 0, 0]])
    assert found.top1_agreement == pytest.approx(2 / 3)


def test_the_divergence_is_from_the_baseline_to_the_candidate() -> None:
    """It is not symmetric: the other direction would hide tokens that the candidate no longer gives."""
    base, other = states([[0.5, 0.5], [0.5, 0.5]]), states([[0.999, 0.001], [0.5, 0.5]])
    forward = compare(base, other, [[0, 0]]).mean_kl
    assert forward == pytest.approx(0.5 * math.log(0.5 / 0.999) + 0.5 * math.log(0.5 / 0.001), rel=1e-5)
    assert compare(other, base, [[0, 0]]).mean_kl < forward / 3


def test_standard_errors_have_samples_as_units() -> None:
    """Tokens of one sample depend on each other: three equal tokens are not three measurements."""
    scored = ScoredTokens([[0] * 4, [0] * 4, [0] * 4], "cpu")
    values = torch.tensor([1.0, 1, 1, 2, 2, 2, 6, 6, 6], dtype=torch.float64)
    assert scored.standard_error(values) == pytest.approx(np.std([1, 2, 6], ddof=1) / math.sqrt(3))


def test_a_percentile_is_exact() -> None:
    values = torch.from_numpy(np.random.default_rng(0).exponential(size=1234))
    assert percentile(values, 0.99) == pytest.approx(np.percentile(values.numpy(), 99), abs=1e-12)
    assert percentile(torch.tensor([3.0]), 0.99) == 3.0


def test_a_walk_gives_what_all_logits_give(tmp_path: Path) -> None:
    base, other = tiny_engine(tmp_path / "a"), tiny_engine(tmp_path / "a2", scheme="w4a16")
    logits = []
    for engine in (base, other):
        model = load_model(engine)
        logits.append(torch.cat([logits_for(model, sample)[:-1] for sample in SAMPLES]).double())
    targets = torch.tensor([token for sample in SAMPLES for token in sample[1:]])
    log_base, log_other = (part.log_softmax(-1) for part in logits)
    kl = (log_base.exp() * (log_base - log_other)).sum(-1)
    found = compare(walked(base), walked(other), SAMPLES)
    assert found.baseline.num_tokens == len(targets) == 12
    assert found.baseline.mean_nll == pytest.approx(float(-log_base.gather(1, targets[:, None]).mean()), rel=1e-5)
    assert found.candidate.mean_nll == pytest.approx(float(-log_other.gather(1, targets[:, None]).mean()), rel=1e-5)
    assert found.mean_kl == pytest.approx(float(kl.mean()), rel=1e-4) and found.mean_kl > 0.01
    assert found.max_kl == pytest.approx(float(kl.max()), rel=1e-4)
    assert found.p99_kl == pytest.approx(np.percentile(kl.numpy(), 99), rel=1e-4)
    assert found.top1_agreement == pytest.approx(float((logits[0].argmax(-1) == logits[1].argmax(-1)).double().mean()))
    assert found.mean_kl_se is not None and 0 < found.mean_kl_se < found.max_kl


def test_equal_engines_do_not_differ(tmp_path: Path) -> None:
    """Exactly: the gate's zero must be zero, in 16 bits too."""
    engine = tiny_engine(tmp_path, dtype="bfloat16", scheme="w4a16")
    found = compare(walked(engine), walked(engine), SAMPLES)
    assert (found.mean_kl, found.p99_kl, found.max_kl, found.top1_agreement, found.ppl_increase) == (0.0, 0.0, 0.0, 1.0, 0.0)


def test_the_size_of_a_stretch_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, other = walked(tiny_engine(tmp_path / "a")), walked(tiny_engine(tmp_path / "b", scheme="w4a16"))
    whole = compare(base, other, SAMPLES)
    monkeypatch.setattr(measure, "CHUNK_BYTES", 4 * 320 * 5)
    seen: list[tuple[int, int]] = []
    parts = compare(base, other, SAMPLES, lambda done, total: seen.append((done, total)))
    assert seen == [(5, 12), (10, 12), (12, 12)]
    for field in Comparison.__dataclass_fields__:
        a, b = ((v.mean_nll, v.num_tokens) if hasattr(v, "mean_nll") else v for v in (getattr(parts, field), getattr(whole, field)))
        assert a == pytest.approx(b, rel=1e-5), "sums in float32, of other lengths"


def test_progress_counts_layers(tmp_path: Path) -> None:
    engine = tiny_engine(tmp_path)
    manifest, seen = load_manifest(engine), []
    kernels = choose_kernels(manifest.model)
    weights = EngineWeights(engine, manifest, kernels.facts.dtype, "cpu")
    final_states(manifest.model, None, weights, kernels, SAMPLES, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    weights.check_all_taken()


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(UsageError, match="vocabulary of 2 tokens, the engine of 3"):
        compare(states(BASE), states([[0.2, 0.3, 0.5]] * 4), TOKENS)
    broken = states(BASE)
    broken = replace(broken, states=broken.states * float("nan"))
    with pytest.raises(QualityError, match="logits of the engine are not finite") as raised:
        compare(states(BASE), broken, TOKENS)
    assert raised.value.exit_code == 6
    with pytest.raises(ValueError, match="nothing to score"):
        score(states(BASE), [[1], [2]])
