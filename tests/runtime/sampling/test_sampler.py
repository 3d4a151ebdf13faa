"""The sampler over whole batches."""

from __future__ import annotations

import math

import pytest
import torch

from dspark.runtime.sampling.rng import exponential_noise, row_key
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.errors import MachineError
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams

VOCAB = 2000


def sequence(number: int, answer: tuple[int, ...] = (), index: int = 0, **options: object) -> Sequence:
    seq = Sequence(Request(number, [1, 2, 3], SamplingParams(**options), draw_key=1000 + number), index, number)  # type: ignore[arg-type]
    seq.token_ids += answer
    return seq


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def sample(logits: torch.Tensor, sequences: list[Sequence], sampler: Sampler | None = None) -> list[int]:
    return (sampler or Sampler(frozenset({7}))).sample(logits.clone(), sequences)[0]


def mixed() -> list[Sequence]:
    options = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 20},
        {"repetition_penalty": 1.3},
        {"temperature": 1.2, "top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 0.7, "min_p": 0.1, "min_tokens": 9},
        {"logit_bias": ((5, 100.0),)},
    ]
    return [sequence(i, answer=(4, 4, 9)[: i % 4], **option) for i, option in enumerate(options)]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """B30: a seeded line changed when another line of its batch had other options. Alone, reversed, in a larger batch: the same."""
    logits, sequences = rows(7), mixed()
    together = sample(logits, sequences)
    assert [sample(logits[i : i + 1], [sequences[i]])[0] for i in range(7)] == together
    assert sample(logits.flip(0), sequences[::-1])[::-1] == together
    assert sample(torch.cat([rows(5, 1), logits]), [*mixed()[:5], *sequences])[5:] == together


def test_greedy_takes_the_largest_and_the_lowest_of_equals() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [1500, 30, 700]] = 5.0
    assert sample(logits, [sequence(0), sequence(1)]) == [0, 30]


def test_a_draw_is_keyed_by_request_sample_and_position() -> None:
    """The documented race: E of row key (draw key, sample index, index of the drawn token), over the softmax."""
    logits = rows(1)
    for index, answer in ((0, ()), (1, ()), (0, (4, 5))):
        seq = sequence(3, answer, index, temperature=1.0)
        noise = exponential_noise([row_key(1003, index, 3 + len(answer))], VOCAB)[0]
        assert sample(logits, [seq]) == [int((noise / torch.softmax(logits[0], -1)).argmin())]


def test_end_of_text_and_stop_tokens_wait_for_min_tokens() -> None:
    """However likely they are, greedy or at random."""
    logits = rows(1)
    logits[0, [7, 8]] = 50.0
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "min_tokens": 2, "stop_token_ids": (8,)}
        for answer in ((), (4,)):
            assert sample(logits, [sequence(0, answer, **options)])[0] not in (7, 8)
        assert sample(logits, [sequence(0, (4, 4), **options)])[0] in (7, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_float_type_is_sampled_as_float32(dtype: torch.dtype) -> None:
    logits = rows(7).to(dtype)
    assert sample(logits, mixed()) == sample(logits.float(), mixed())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_rows_are_not_widened_and_give_the_same_tokens(dtype: torch.dtype) -> None:
    """Rows of greedy requests are searched as they are stored; beside a row that draws, or with gaps recorded, as float32."""
    logits = rows(5).to(dtype)
    logits[4] = torch.where(logits[4] > 0, -0.0, logits[4])  # the largest is zero, of either sign
    sequences = [sequence(i) for i in range(5)]
    tokens = logits.float().argmax(-1).tolist()
    assert Sampler(frozenset()).sample(logits.clone(), sequences) == (tokens, None)
    assert Sampler(frozenset(), record_gaps=True).sample(logits.clone(), sequences)[0] == tokens
    assert sample(logits, [*sequences[:4], sequence(4, temperature=1.0)])[:4] == tokens[:4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, "all nan", "all -inf"])
def test_a_row_without_finite_logits_is_an_error_that_names_the_request(temperature: float, bad: float | str, dtype: torch.dtype) -> None:
    """It gave token 0 (greedy) or token -1 (at random) without a word."""
    logits = rows(3).to(dtype)
    if isinstance(bad, str):
        logits[1] = float(bad.removeprefix("all "))
    else:
        logits[1, 1234] = bad
    sequences = [sequence(i + 40, temperature=temperature) for i in range(3)]
    with pytest.raises(MachineError, match="no finite logits for request 41 at token 3"):
        sample(logits, sequences)
    assert len(sample(logits[[0, 2]], [sequences[0], sequences[2]])) == 2


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-38, 1e38, 1e300])
def test_extreme_temperatures_draw_a_token(temperature: float) -> None:
    """In float32 they are 0 or infinite: the draw found no token and gave -1, an id that no tokenizer has."""
    logits = rows(1)
    logits[0, :1000] = -math.inf
    token = sample(logits, [sequence(0, temperature=temperature)])[0]
    assert token == int(logits.argmax()) if temperature < 1 else token >= 1000


def test_gaps_are_recorded_for_the_logits_that_were_chosen_from() -> None:
    """After penalties and bias: that distance says whether rounding could have changed the token."""
    sampler = Sampler(frozenset(), record_gaps=True)
    logits = torch.zeros(2, VOCAB)
    logits[:, 10], logits[:, 20] = 3.0, 2.5
    tokens, gaps = sampler.sample(logits, [sequence(0), sequence(1, logit_bias=((20, 4.0),))])
    assert tokens == [10, 20] and gaps == [0.5, 3.5]
    assert Sampler(frozenset()).sample(logits, [sequence(0), sequence(1)])[1] is None


def test_a_draft_is_drawn_as_the_target_draws_and_ends_where_nothing_is_possible() -> None:
    """A draft model with a part of the vocabulary may have none of the tokens that a request allows: no error, no draft."""
    logits, sequences, sampler = rows(7), mixed(), Sampler(frozenset({7}))
    drawn, processed = sampler.sample_drafts(logits.clone(), sequences)
    assert drawn == sample(logits, sequences)
    assert processed[6, 5] == pytest.approx(float(logits[6, 5]) + 100.0)
    logits[2] = -math.inf
    assert sampler.sample_drafts(logits.clone(), sequences)[0] == [*drawn[:2], -1, *drawn[3:]]
