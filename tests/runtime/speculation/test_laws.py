"""Both rules keep the law of plain decoding: chi-square tests of 200,000 texts each against exact probabilities, with fixed seeds.

Together they fail a right program with a probability of 1 in 1000; each has its share of that.
"""

import numpy as np
import pytest
from sampling_laws import LONGEST, Options, chi_square, coupled_texts, exact_law, limit, proposer, rejection_texts

from dspark.runtime.speculation.planner import best_counts, schedule_early_stop

CHAINS = 200_000
NUM_TESTS = 60
KINDS = ("perfect", "near", "random", "point", "adversarial")
OPTIONS = (Options(0.3), Options(1.0, top_k=3), Options(1.7, top_p=0.8))
MORE_OPTIONS = (Options(1.0), Options(1.7), Options(0.3, top_p=0.9), Options(0.8, top_k=4, min_p=0.15))
COUPLED_TOO = (OPTIONS[0], OPTIONS[2], *MORE_OPTIONS)


def full(drafts: np.ndarray, dice: np.random.Generator) -> np.ndarray:
    return np.full(len(drafts), LONGEST)


def holds(texts: np.ndarray, options: Options) -> bool:
    statistic, degrees = chi_square(texts, exact_law(options))
    return statistic < limit(degrees, 1e-3 / NUM_TESTS)


@pytest.mark.parametrize("options", [*OPTIONS, *(pytest.param(options, marks=pytest.mark.slow) for options in MORE_OPTIONS)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rejection_keeps_the_law(kind: str, options: Options) -> None:
    assert holds(rejection_texts(CHAINS, proposer(kind, options), options, full, seed=1), options)


@pytest.mark.parametrize("options", [OPTIONS[1], *(pytest.param(options, marks=pytest.mark.slow) for options in COUPLED_TOO)], ids=str)
def test_coupling_keeps_the_law_and_the_text(options: Options) -> None:
    """The same noise draws the draft and the target's token, and still: the law is right, and no draft changes a text."""
    texts = coupled_texts(CHAINS, proposer("near", options), options, full, seed=2)
    assert holds(texts, options)
    for kind in KINDS:
        few = coupled_texts(CHAINS // 20, proposer(kind, options), options, lambda drafts, dice: dice.integers(0, 4, len(drafts)), seed=3)
        if kind == KINDS[0]:
            first = few
        assert np.array_equal(few, first)


@pytest.mark.parametrize("length", range(LONGEST + 1))
def test_every_length_of_verification_keeps_the_law(length: int) -> None:
    """After a draft that was cut, the next token is drawn from p, never from a residual."""
    texts = rejection_texts(CHAINS, proposer("random", Options()), Options(), lambda drafts, _: np.full(len(drafts), length), seed=4)
    assert holds(texts, Options())


def test_lengths_may_look_at_the_tokens_before() -> None:
    """Whether x2 is verified depends on x1, and whether x1 is, on a coin."""

    def lengths(drafts: np.ndarray, dice: np.random.Generator) -> np.ndarray:
        return np.where(dice.random(len(drafts)) < 0.3, 0, np.where(drafts[:, 0] % 2 == 0, 1, np.where(drafts[:, 1] < 2, 2, 3)))

    assert holds(rejection_texts(CHAINS, proposer("near", Options()), Options(), lengths, seed=5), Options())


def test_lengths_that_look_at_the_token_itself_are_seen() -> None:
    """The fault that the rule about schedules is for, and a sign that these tests see one."""

    def lengths(drafts: np.ndarray, _: np.random.Generator) -> np.ndarray:
        return np.where(drafts[:, 0] % 2 == 0, 1, 0)

    assert not holds(rejection_texts(CHAINS, proposer("near", Options()), Options(), lengths, seed=6), Options())


@pytest.mark.parametrize("told", [Options(1.2), Options(1.0, top_k=4)], ids=["other-temperature", "before-top-k"])
def test_a_distribution_that_is_not_the_very_one_is_seen(told: Options) -> None:
    """q must be what the token was drawn from, after temperature and cuts."""
    maker = proposer("near", Options())
    texts = rejection_texts(CHAINS, maker, Options(), full, seed=7, claimed=told.table(maker.logits))
    assert not holds(texts, Options())


@pytest.mark.parametrize(("schedule", "kept"), [(schedule_early_stop, True), (best_counts, False)], ids=["early-stop", "global"])
def test_the_planner_for_random_drafts_looks_at_no_token_that_it_decides_on(schedule, kept: bool) -> None:
    """Confidences that say what the token before them was, step costs in a staircase: one search keeps the law, the other does not."""
    seconds = {1: 1.0, 2: 2.0, 3: 1 / 0.45, 4: 1 / 0.43}

    def lengths(drafts: np.ndarray, _: np.random.Generator) -> np.ndarray:
        by_case = {}
        for first in range(5):
            for second in range(5):
                confidences = np.cumprod([0.8, 0.9 if first % 2 else 0.01, 0.9 if second % 2 else 0.01]).tolist()
                by_case[first, second] = schedule([confidences], 1, seconds.__getitem__)[0]
        table = np.asarray([[by_case[i, j] for j in range(5)] for i in range(5)])
        return table[drafts[:, 0], drafts[:, 1]]

    assert holds(rejection_texts(CHAINS, proposer("random", Options()), Options(), lengths, seed=8), Options()) is kept
