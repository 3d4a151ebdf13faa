"""When an answer ends, and which of several reasons is named."""

from __future__ import annotations

import pytest

from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.scheduling.stopping import check_stop
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams

EOS = frozenset({2, 3})
CONTEXT = 100


class ListedStopper:
    """Says a stop text is complete at the tokens it is told."""

    def __init__(self, matches: dict[int, str]) -> None:
        self.matches = matches
        self.seen: list[int] = []

    def append(self, token_id: int) -> str | None:
        self.seen.append(token_id)
        return self.matches.get(token_id)


def run(tokens: list[int], matches: dict[int, str] | None = None, max_model_len: int = CONTEXT, **options: object) -> Sequence:
    """Append tokens until the answer ends; all of them must be needed."""
    seq = Sequence(Request(0, [7, 8, 9], SamplingParams(**options)), 0, 0)  # type: ignore[arg-type]
    if matches is not None:
        seq.stopper = ListedStopper(matches)
    for i, token in enumerate(tokens):
        assert seq.finish_reason is None, f"ended at token {i} of {len(tokens)}"
        seq.token_ids.append(token)
        check_stop(seq, EOS, max_model_len)
    return seq


def reasons(seq: Sequence) -> tuple[str | None, int | str | None]:
    return seq.finish_reason, seq.stop_reason


@pytest.mark.parametrize("eos", [2, 3])
def test_every_end_of_text_token_ends_the_answer(eos: int) -> None:
    """Models have several (end of text, end of turn); only the first was looked at. stop_reason stays None: nothing the user named."""
    assert reasons(run([5, 6, eos])) == ("stop", None)


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    assert reasons(run([2, 3, 2, 3], ignore_eos=True, max_tokens=4)) == ("length", None)


def test_prompt_tokens_never_end_an_answer() -> None:
    """The prompt may well hold end-of-text and stop tokens."""
    assert reasons(run([5, 6], stop_token_ids=(7, 8, 9))) == (None, None)


def test_a_stop_token_is_named() -> None:
    assert reasons(run([5, 6], stop_token_ids=(4, 6))) == ("stop", 6)


def test_a_stop_text_is_named() -> None:
    assert reasons(run([5, 6], {6: "END"}, stop=("END",))) == ("stop", "END")


def test_max_tokens_ends_with_length() -> None:
    assert reasons(run([5, 5], max_tokens=2)) == ("length", None)


def test_context_ends_with_length_and_counts_the_prompt() -> None:
    assert reasons(run([5, 5], max_model_len=5, max_tokens=None)) == ("length", None)
    assert reasons(run([5], max_model_len=5, max_tokens=None)) == (None, None)


@pytest.mark.parametrize(
    ("token", "options", "matches", "expected"),
    [
        (2, {"stop_token_ids": (2,), "max_tokens": 1}, {2: "x"}, ("stop", None)),
        (2, {"stop_token_ids": (2,), "max_tokens": 1, "ignore_eos": True}, {2: "x"}, ("stop", 2)),
        (4, {"stop_token_ids": (4,), "max_tokens": 1}, {4: "x"}, ("stop", 4)),
        (5, {"stop_token_ids": (4,), "max_tokens": 1}, {5: "x"}, ("stop", "x")),
        (5, {"stop_token_ids": (4,), "max_tokens": 1}, {4: "x"}, ("length", None)),
    ],
)
def test_of_several_reasons_the_first_in_order_is_named(token: int, options: dict, matches: dict, expected: tuple) -> None:
    """End of text, stop token, stop text, length. A stop on the very last token allowed is a stop, not "length"."""
    assert reasons(run([token], matches, **options)) == expected


def test_before_min_tokens_nothing_but_length_ends_the_answer() -> None:
    """The token that makes min_tokens full may end it."""
    assert reasons(run([2, 4, 5], {5: "x"}, stop_token_ids=(4,), min_tokens=4)) == (None, None)
    assert reasons(run([2, 4, 2], {5: "x"}, stop_token_ids=(4,), min_tokens=3)) == ("stop", None)
    assert reasons(run([2, 4, 5], {5: "x"}, stop_token_ids=(4,), min_tokens=3)) == ("stop", "x")
    assert reasons(run([2, 4], min_tokens=3, max_model_len=5, max_tokens=None)) == ("length", None)


def test_the_stopper_sees_every_token_once_and_in_order() -> None:
    """It follows the text: a token that is kept from it (eos, those before min_tokens) would shift all that come after."""
    tokens = [2, 4, 5, 6, 2]
    seq = run(tokens, {}, min_tokens=5, stop_token_ids=(4,))
    assert seq.finish_reason == "stop"
    assert seq.stopper.seen == tokens  # type: ignore[attr-defined]
