"""The compiled loops against the slow clear form: `filters.probabilities` and `rng.exponential_noise`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from dspark.runtime.sampling.draw import argmax_rows, draw_rows, top2_gaps
from dspark.runtime.sampling.filters import probabilities
from dspark.runtime.sampling.rng import exponential_noise, row_key
from dspark.runtime.sampling.sampler import DrawOptions

Options = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


def options_of(each: list[Options], keys: list[int]) -> DrawOptions:
    temperature, top_k, top_p, min_p = zip(*each)
    return DrawOptions(
        rows=np.arange(len(each)),
        temperature=np.asarray(temperature, np.float32),
        top_k=np.asarray(top_k, np.int64),
        top_p=np.asarray(top_p, np.float64),
        min_p=np.asarray(min_p, np.float64),
        keys=np.asarray(keys, np.uint64),
    )


def drawn(logits: np.ndarray, each: list[Options], keys: list[int]) -> np.ndarray:
    return draw_rows(logits, argmax_rows(logits), options_of(each, keys))


def rows_of(kind: str, num_rows: int, vocab_size: int) -> np.ndarray:
    rng = np.random.default_rng(vocab_size)
    logits = rng.standard_normal((num_rows, vocab_size)).astype(np.float32) * 3
    if kind == "peaked":
        logits[:, :5] += 12
    elif kind == "tied":  # like 8-bit logits: many exact ties, also at every cut
        logits = np.round(logits)
    elif kind == "masked":
        logits[:, ::3] = -np.inf
    elif kind == "wide":
        logits *= 60
    return logits


COMBINATIONS = list(itertools.product([0.3, 1.0, 1.7], [0, 1, 5, 300], [1.0, 0.999999, 0.9, 0.3, 1e-9], [0.0, 0.02, 1.0]))


@pytest.mark.parametrize("vocab_size", [7, 1024, 3001])
@pytest.mark.parametrize("kind", ["plain", "peaked", "tied", "masked", "wide"])
def test_a_draw_wins_the_race_over_the_filtered_probabilities(kind: str, vocab_size: int) -> None:
    """Every combination of options, a key of its own for each. Rows where two tokens race within rounding of each other, or where a token
    stands within rounding of a cut, may go either way: none may go to a token that is neither."""
    logits = rows_of(kind, len(COMBINATIONS), vocab_size)
    keys = [row_key(11, 0, position) for position in range(len(COMBINATIONS))]
    tokens = drawn(logits, COMBINATIONS, keys)
    noise = exponential_noise(keys, vocab_size)
    num_other = 0
    for row, (token, options) in enumerate(zip(tokens.tolist(), COMBINATIONS)):
        race = noise[row] / probabilities(torch.from_numpy(logits[row]), *options)
        best = int(race.argmin())
        if token != best:
            num_other += 1
            assert race[token] <= race[best] * (1 + 1e-5), (options, token, best)
    assert num_other <= 1


def test_a_token_at_a_cut_is_the_lower_one_of_equals() -> None:
    """All logits equal: top-k and top-p keep the first ids, over more tokens than one chunk of the loops."""
    logits = np.zeros((200, 5000), np.float32)
    keys = [row_key(3, 0, position) for position in range(200)]
    for options, kept in [
        ((1.0, 1500, 1.0, 0.0), 1500),
        ((1.0, 0, 0.5, 0.0), 2500),
        ((1.0, 2000, 0.25, 1.0), 500),
        ((1.0, 1, 1.0, 0.0), 1),
    ]:
        tokens = drawn(logits, [options] * 200, keys)
        noise = exponential_noise(keys, kept)
        assert tokens.tolist() == noise.argmin(1).tolist()


def test_a_token_is_dropped_when_those_before_it_have_the_mass_exactly() -> None:
    """Two of four equal tokens are one half: the third is one too many."""
    for top_p, kept in [(0.25, 1), (0.5, 2), (0.75, 3), (0.76, 4)]:
        for top_k in (0, 4):
            tokens = drawn(np.zeros((200, 4), np.float32), [(1.0, top_k, top_p, 0.0)] * 200, list(range(200)))
            assert set(tokens.tolist()) == set(range(kept))
        tokens = drawn(np.zeros((200, 5), np.float32), [(1.0, 4, top_p, 0.0)] * 200, list(range(200)))
        assert set(tokens.tolist()) == set(range(kept)), "within what top-k left"


@pytest.mark.parametrize(
    ("logits", "options"),
    [
        ([0.0, 1.0, 2.0, -1.0], (1.0, 0, 1.0, 0.0)),
        ([0.0, 1.0, 2.0, -1.0], (0.6, 3, 1.0, 0.0)),
        ([0.0, 1.0, 2.0, -1.0, 0.5, 0.2], (1.3, 0, 0.9, 0.0)),
        ([0.0, 1.0, 2.0, -1.0, -np.inf, 1.9], (1.0, 0, 1.0, 0.2)),
        ([-7.0] + [0.0] * 9, (2.0, 0, 1.0, 0.0)),
    ],
)
def test_draws_follow_the_distribution(logits: list[float], options: Options) -> None:
    """Chi-square over 40,000 positions of one stream; the bound is passed by a right sampler in all but one of 10^6 streams, and the
    stream is fixed. A sampler at a temperature 10 % off is far outside."""
    count = 40_000
    probs = probabilities(torch.tensor(logits), *options).double()
    keys = [row_key(2024, 0, position) for position in range(count)]
    rows = np.repeat(np.asarray([logits], np.float32), count, 0)
    observed = np.bincount(drawn(rows, [options] * count, keys), minlength=len(logits))

    def chi_square(expected: torch.Tensor) -> float:
        kept = (expected > 0).numpy()
        assert observed[~kept].sum() == 0
        wanted = expected.numpy()[kept] * count
        return float(((observed[kept] - wanted) ** 2 / wanted).sum())

    assert chi_square(probs) < {2: 28, 3: 32, 4: 34, 5: 36, 9: 46}[int((probs > 0).sum()) - 1]
    if options[0] != 2.0:
        assert chi_square(probabilities(torch.tensor(logits), options[0] * 1.1, *options[1:]).double()) > 46


def test_top_k_of_one_is_greedy() -> None:
    """Also with ties, and as the limit of small temperatures, of top_p and of min_p."""
    for kind in ("plain", "tied"):
        logits = rows_of(kind, 64, 3001)
        keys = list(range(64))
        greedy = argmax_rows(logits).tolist()
        assert drawn(logits, [(1.5, 1, 1.0, 0.0)] * 64, keys).tolist() == greedy
        assert drawn(logits, [(1.0, 0, 1e-12, 0.0)] * 64, keys).tolist() == greedy
    logits = rows_of("plain", 64, 3001)
    for options in [(1e-6, 0, 1.0, 0.0), (1e-30, 0, 1.0, 0.0), (1.0, 0, 1.0, 1.0)]:
        assert drawn(logits, [options] * 64, keys).tolist() == argmax_rows(logits).tolist()


def test_a_row_does_not_depend_on_the_batch() -> None:
    """Alone, in another order, among other options: the same token."""
    logits = rows_of("plain", len(COMBINATIONS), 3001)
    keys = [row_key(5, 1, position) for position in range(len(COMBINATIONS))]
    tokens = drawn(logits, COMBINATIONS, keys)
    for row in range(0, len(COMBINATIONS), 7):
        assert drawn(logits[row : row + 1], [COMBINATIONS[row]], [keys[row]])[0] == tokens[row]
    order = np.random.default_rng(0).permutation(len(COMBINATIONS))
    shuffled = drawn(logits[order], [COMBINATIONS[i] for i in order], [keys[i] for i in order])
    assert (shuffled == tokens[order]).all()


def test_another_key_draws_another_token() -> None:
    """Over a flat row nearly every key has a winner of its own."""
    logits = np.zeros((500, 3001), np.float32)
    assert len(set(drawn(logits, [(1.0, 0, 1.0, 0.0)] * 500, list(range(500))).tolist())) > 400


@pytest.mark.parametrize("vocab_size", [1, 2, 1023, 1024, 1025, 5000])
def test_argmax_is_the_lowest_of_the_largest(vocab_size: int) -> None:
    """Ties within a chunk, between chunks and of both zeros; all negative rows; masked rows."""
    rng = np.random.default_rng(1)
    logits = rng.integers(-4, 3, (60, vocab_size)).astype(np.float32)
    logits[10:20] -= 100
    logits[20:30] = np.where(rng.random((10, vocab_size)) < 0.5, -0.0, 0.0)
    logits[30:40, : vocab_size // 2] = -np.inf
    assert argmax_rows(logits).tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("position", [0, 500, 1500, 2999])
def test_a_row_without_a_finite_best_has_no_argmax(bad: float, position: int) -> None:
    """A NaN compares false with everything, so it was passed over in silence; both signs, for the bit patterns differ."""
    logits = rows_of("plain", 3, 3000)
    logits[1, position] = bad
    tokens = argmax_rows(logits)
    assert tokens[1] == -1 and tokens[0] == logits[0].argmax() and tokens[2] == logits[2].argmax()


def test_rows_of_nothing_but_nan_or_minus_infinity_have_no_argmax() -> None:
    logits = np.stack([np.full(2000, np.nan, np.float32), np.full(2000, -np.inf, np.float32)])
    assert argmax_rows(logits).tolist() == [-1, -1]


def test_gaps_are_largest_minus_second_largest() -> None:
    """Equal largest ones have a gap of 0: that is what excuses a differing token."""
    logits = rows_of("tied", 40, 2500)
    logits[0, 7] = 100
    largest = np.sort(logits, 1)
    assert np.array_equal(top2_gaps(logits, argmax_rows(logits)), largest[:, -1] - largest[:, -2])
    for token in (0, 2499):
        row = np.zeros((1, 2500), np.float32)
        row[0, token] = 3
        assert top2_gaps(row, np.array([token])).tolist() == [3]
