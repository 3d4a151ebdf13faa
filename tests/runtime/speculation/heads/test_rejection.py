"""Heads under the rejection rule: what is verified are their own draws, from distributions that they bring along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from draft_reference import Reference
from draft_runs import compare, requests, run

from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.heads.chains import _request

REJECTION = {"speculative": "ngram", "speculative_sampling": "rejection"}


@pytest.mark.parametrize("kind", ["deepspec-vanilla", "eagle3-original"])
def test_drafts_are_drawn_from_what_they_bring(kind: str, target: Any, stored: Callable[..., Any]) -> None:
    draft, asked = stored(kind), requests(20, temperature=0.8, top_k=30)
    got = run(target.engine, asked, draft.build(keep_distributions=True), **REJECTION)
    drafts = [proposal.draft for proposal in got.speculator.proposals if proposal.draft is not None]
    assert len(drafts) > 20 and all(len(made.distributions) == len(made) for made in drafts)
    assert all(float(made.distributions[i, token]) > 0 for made in drafts for i, token in enumerate(made.token_ids))
    compare(got.speculator.proposals, Reference(draft.made, target.model))
    assert sum(got.speculator.accepted) > 0


def test_greedy_answers_stay(target: Any, stored: Callable[..., Any]) -> None:
    draft, asked = stored("deepspec-vanilla"), requests(20)
    got = run(target.engine, asked, draft.build(keep_distributions=True), **REJECTION)
    assert got.outputs == run(target.engine, asked).outputs


def test_a_draft_apart_has_noise_of_its_own_each_time() -> None:
    """By position alone a token that is drafted again would be the one that was dropped, and what was decided because of it is known."""
    request = requests()[0]
    seq = Sequence(request, 0, 0)
    first = _request(seq, True)
    seq.token_ids.append(5)
    second = _request(seq, True)
    assert len({request.draw_key, first.draw_key, second.draw_key}) == 3 and max(first.draw_key, second.draw_key) < 2**128
    assert _request(seq, False) is request
