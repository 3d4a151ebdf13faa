"""Penalties, bias and masks, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.runtime.sampling.penalties import changes_logits, process_row
from dspark.runtime.spec.sampling_params import SamplingParams

INF = float("inf")
EOS = frozenset({3})


def processed(logits: list[float], prompt: list[int], answer: list[int], **options: object) -> list[float]:
    row = np.asarray(logits, np.float32)
    params = SamplingParams(**options)  # type: ignore[arg-type]
    before = row.copy()
    process_row(row, params, [*prompt, *answer], len(prompt), EOS)
    if not changes_logits(params, len(answer)):
        assert (row == before).all(), "the row is changed although it is said to stay"
    return row.tolist()


L = [2.0, -2.0, 0.0, 1.0]


def test_repetition_penalty_counts_prompt_and_answer_once() -> None:
    """Positive logits are divided, negative ones multiplied: divided, they would become likelier. However often a token occurred."""
    assert processed(L, [0, 0], [1, 1, 2], repetition_penalty=2.0) == [1.0, -4.0, 0.0, 1.0]
    assert processed(L, [0], [], repetition_penalty=2.0) == [1.0, -2.0, 0.0, 1.0]
    assert processed(L, [0], [1], repetition_penalty=0.5) == [4.0, -1.0, 0.0, 1.0]


def test_presence_penalty_counts_the_answer_only_and_once() -> None:
    assert processed(L, [0, 3], [1, 1, 2], presence_penalty=0.5) == [2.0, -2.5, -0.5, 1.0]
    assert processed(L, [0, 1], [], presence_penalty=0.5) == L


def test_frequency_penalty_counts_each_occurrence_in_the_answer() -> None:
    assert processed(L, [0, 1], [1, 1, 2], frequency_penalty=0.5) == [2.0, -3.0, -0.5, 1.0]
    assert processed(L, [0, 1], [1, 1, 2], frequency_penalty=-0.5) == [2.0, -1.0, 0.5, 1.0]


def test_penalties_act_in_their_order() -> None:
    """Repetition multiplies what the others have not yet shifted: (2 / 2) - 0.5 - 2 * 0.25 + 3."""
    answer = processed(L, [0], [0, 0], repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((0, 3.0),))
    assert answer == [3.0, -2.0, 0.0, 1.0]


def test_bias_is_added() -> None:
    assert processed(L, [0], [], logit_bias=((0, -100.0), (2, 1.5))) == [-98.0, -2.0, 1.5, 1.0]


def test_min_tokens_forbids_the_ends_until_it_is_reached() -> None:
    """The sampler of answer token number k + 1 sees k tokens: with min_tokens 2 the third may be an end (the second ends too early)."""
    options = {"min_tokens": 2, "stop_token_ids": (1,)}
    masked = [2.0, -INF, 0.0, -INF]
    assert processed(L, [0, 0, 0], [], **options) == masked
    assert processed(L, [0, 0, 0], [2], **options) == masked
    assert processed(L, [0, 0, 0], [2, 2], **options) == L


def test_bias_cannot_lift_a_forbidden_end() -> None:
    assert processed(L, [0], [], min_tokens=1, logit_bias=((3, 100.0),)) == [2.0, -2.0, 0.0, -INF]


def test_an_ignored_end_of_text_stays_possible_before_min_tokens() -> None:
    """ignore_eos makes it a token like any other; a stop token is forbidden all the same."""
    assert processed(L, [0], [], min_tokens=5, ignore_eos=True) == L
    assert processed(L, [0], [], min_tokens=5, ignore_eos=True, stop_token_ids=(3,)) == [2.0, -2.0, 0.0, -INF]


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e-30, 1e30, 1e300])
def test_extreme_penalties_leave_finite_logits(penalty: float) -> None:
    """float32 turned 1e-46 into 0 and 2 / 0 into infinity: one line's option must not stop the run."""
    assert np.isfinite(processed([20.0, -20.0, 0.0, 1.0], [0, 1, 2], [], repetition_penalty=penalty)).all()


def test_rows_without_active_options_are_left_alone() -> None:
    """The check that saves the work must not skip any option."""
    assert not changes_logits(SamplingParams(), 5)
    assert not changes_logits(SamplingParams(presence_penalty=1.0, frequency_penalty=1.0), 0)
    for options in (
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": ((0, 1.0),)},
        {"min_tokens": 6},
    ):
        assert changes_logits(SamplingParams(**options), 5)  # type: ignore[arg-type]
