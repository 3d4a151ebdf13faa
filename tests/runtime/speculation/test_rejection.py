"""The rejection rule of whole sequences: options, streams and rows, against the rule written out in plain Python."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from dspark.runtime.sampling.filters import probabilities
from dspark.runtime.sampling.penalties import process_row
from dspark.runtime.sampling.rng import ACCEPTANCE, REPLACEMENTS, TOKENS, exponential_noise, row_key
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.plan import ScheduledSequence
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.draft import ROOT, Draft
from dspark.runtime.speculation.rejection import verify_rejection
from dspark.runtime.speculation.verify import verify_coupled

VOCAB, EOS = 40, 3
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.4, "top_k": 7},
    {"temperature": 1.6, "top_p": 0.6, "repetition_penalty": 1.4},
    {"temperature": 0.9, "min_p": 0.1, "presence_penalty": 0.8, "frequency_penalty": 0.5},
    {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": (5, 6, 7)},
    {"temperature": 1.0, "logit_bias": ((4, 2.5), (9, -30.0))},
    {},
)


def items(seed: int, count: int) -> tuple[list[ScheduledSequence], torch.Tensor]:
    """Sequences with drafts of 0 to 4 tokens, with and without distributions, and logits that are near the drafts' own."""
    dice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    made, rows = [], []
    for i in range(count):
        tokens = [dice.randrange(VOCAB) for _ in range(dice.randint(2, 9))]
        params = SamplingParams(max_tokens=30, **OPTIONS[i % len(OPTIONS)])
        seq = Sequence(Request(i, tokens[:2], params, draw_key=dice.getrandbits(128)), dice.randrange(3), i)
        seq.token_ids += tokens[2:]
        seq.num_computed = seq.num_tokens - 1
        length = dice.randint(0, 4)
        logits = torch.randn(length + 1, VOCAB, generator=generator) * 2
        rows.append(logits)
        near = torch.softmax(logits[:length] + torch.randn(length, VOCAB, generator=generator), -1)
        drawn = near.multinomial(1, generator=generator)[:, 0].tolist() if length else []
        draft = Draft(tuple(drawn), (0.5,) * length, "a", None, near if dice.random() < 0.6 else None) if length else None
        made.append(ScheduledSequence(seq, 1, draft))
    return made, torch.cat(rows)


def by_the_rule(item: ScheduledSequence, logits: torch.Tensor) -> tuple[list[int], int]:
    """(tokens gained, tokens accepted), one draw after the other."""
    seq, params = item.seq, item.seq.request.params
    draft = item.draft.token_ids if item.draft else ()
    history = list(seq.token_ids)
    for place, row in enumerate(logits):
        row = row.clone().numpy()
        process_row(row, params, history, seq.prompt_len, frozenset({EOS}))
        if params.is_greedy:
            p = np.eye(VOCAB)[row.argmax()]
        else:
            p = probabilities(torch.from_numpy(row), params.temperature, params.top_k, params.top_p, params.min_p).double().numpy()
        if place < len(draft):
            token = draft[place]
            q = np.eye(VOCAB)[token]
            if item.draft.distributions is not None and not params.is_greedy:
                q = item.draft.distributions[place].double().numpy()
            if uniform(seq, len(history)) < min(1.0, p[token] / q[token]):
                history.append(token)
                continue
            p = np.maximum(p - q, 0)
        noise = exponential_noise([row_key(seq.request.draw_key, seq.index, len(history), REPLACEMENTS)], VOCAB)[0].double().numpy()
        history.append(int(np.argmin(np.where(p > 0, noise / np.where(p > 0, p, 1), np.inf))))
        return history[seq.num_tokens :], place
    raise AssertionError("unreachable")


def uniform(seq: Sequence, position: int) -> float:
    """The first output of SplitMix64, its upper 53 bits."""
    z = (row_key(seq.request.draw_key, seq.index, position, ACCEPTANCE) + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return ((z ^ z >> 31) // 2**11 + 0.5) * 2.0**-53


@pytest.mark.parametrize("seed", range(4))
def test_equals_the_rule_written_out(seed: int) -> None:
    sampling, logits = items(seed, 210)
    gained = verify_rejection(Sampler(frozenset({EOS})), logits.clone(), sampling)
    first, kept = 0, 0
    for item, verified in zip(sampling, gained, strict=True):
        rows = 1 + (len(item.draft) if item.draft else 0)
        assert (verified.token_ids, verified.num_accepted) == by_the_rule(item, logits[first : first + rows])
        assert verified.nodes == tuple(range(verified.num_accepted))
        first += rows
        kept += verified.num_accepted
    assert kept > 100


def test_what_is_drawn_depends_on_no_neighbour() -> None:
    sampling, logits = items(9, 70)
    sampler = Sampler(frozenset({EOS}), record_gaps=True)
    together = verify_rejection(sampler, logits.clone(), sampling)
    first = 0
    for item, verified in zip(sampling, together, strict=True):
        rows = 1 + (len(item.draft) if item.draft else 0)
        assert verify_rejection(sampler, logits[first : first + rows].clone(), [item]) == [verified]
        assert verified.top2_gaps is not None and len(verified.top2_gaps) == len(verified.token_ids)
        first += rows


def test_greedy_answers_are_those_of_the_coupled_rule() -> None:
    sampling, logits = items(5, 60)
    for item in sampling:
        object.__setattr__(item.seq.request, "params", SamplingParams(max_tokens=30))
    logits[::3, 7] = 50.0
    for item in sampling:
        if item.draft:
            item.draft = Draft((7,) * len(item.draft), item.draft.survival, "a")
    sampler = Sampler(frozenset({EOS}))
    gained = verify_rejection(sampler, logits.clone(), sampling)
    assert gained == verify_coupled(sampler, logits.clone(), sampling)
    assert any(verified.num_accepted for verified in gained)


def test_the_streams_of_a_position_are_three() -> None:
    """A draft may know the noise of the tokens; a bonus that were drawn with it would not be independent of how much was verified."""
    keys = {row_key(5, index, 9, stream) for index in range(4) for stream in (TOKENS, ACCEPTANCE, REPLACEMENTS)}
    assert len(keys) == 12 and row_key(5, 1, 9) == row_key(5, 1, 9, TOKENS)


def test_a_draft_of_the_very_distribution_is_kept() -> None:
    """p and q by two programs differ in their last bits; what is rejected for that is drawn from p, not from the noise of a difference."""
    generator = torch.Generator().manual_seed(1)
    made, rows = [], []
    for i in range(300):
        seq = Sequence(Request(i, [1, 2], SamplingParams(temperature=0.7, top_k=9), draw_key=i), 0, i)
        seq.num_computed = 1
        logits = torch.randn(3, VOCAB, generator=generator)
        q = torch.stack([probabilities(row, 0.7, 9, 1.0, 0.0) for row in logits[:2]])
        made.append(ScheduledSequence(seq, 1, Draft(tuple(q.multinomial(1, generator=generator)[:, 0].tolist()), (1.0,) * 2, "a", None, q)))
        rows.append(logits)
    gained = verify_rejection(Sampler(frozenset()), torch.cat(rows), made)
    assert all(verified.num_accepted == 2 for verified in gained)


def test_trees_are_refused() -> None:
    sampling, _ = items(3, 1)
    sampling[0].draft = Draft((1, 2), (0.5, 0.5), "a", (ROOT, ROOT))
    with pytest.raises(AssertionError, match="verifies chains"):
        verify_rejection(Sampler(frozenset()), torch.zeros(3, VOCAB), sampling)
