"""Faults that other implementers reported, each built into the straight-line implementation: none of them may go unseen.

A test here shows that the fault changes what is drafted by far more than the equality tests allow, and that ours has it not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draft_reference import Reference
from draft_runs import run

from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams

BLOCK_TRAPS = (
    "rows shifted",
    "tap before the layer",
    "tap after the next layer",
    "causal block",
    "block at the last feature",
    "context without the last tokens",
    "context through the input norm",
    "another mask token",
)
CHAIN_TRAPS = ("no Markov bias", "bias of the token before", "estimate from the token itself")
EAGLE_TRAPS = (
    "tap before the layer",
    "tap after the next layer",
    "a feature with its own token",
    "a pair for the first token",
    "context without the last tokens",
    "feature before embedding",
    "the other residual",
    "the other output goes back",
)
CASES = [
    *(("deepspec-vanilla", trap) for trap in (*BLOCK_TRAPS, *CHAIN_TRAPS)),
    *(("zlab-dflash", trap) for trap in BLOCK_TRAPS),
    *(("eagle3-original", trap) for trap in (*EAGLE_TRAPS, "draft tokens for target tokens")),
    *(("eagle3-speculators", trap) for trap in EAGLE_TRAPS),
    ("speculators-dflash", "draft tokens for target tokens"),
    ("speculators-shifted", "rows shifted"),
]


@pytest.fixture(scope="module")
def drafted(target: Any, stored: Callable[..., Any]) -> Callable[[str], list[Any]]:
    """A few drafts of a kind with their distributions, in a context of some length."""
    known: dict[str, list[Any]] = {}

    def make(kind: str) -> list[Any]:
        if kind not in known:
            prompt = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(2)).tolist()
            asked = [Request(0, prompt, SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0), draw_key=4)]
            got = run(target.engine, asked, stored(kind).build(keep_distributions=True))
            known[kind] = [proposal for proposal in got.speculator.proposals if len(proposal.draft) > 2][:4]
        return known[kind]

    return make


def distance(proposals: list[Any], reference: Reference) -> float:
    """Largest difference of a probability or an estimate."""
    worst = 0.0
    for proposal in proposals:
        draft = proposal.draft
        wanted = reference.draft(proposal.tokens, len(draft), proposal.request, proposal.index, draft.token_ids)
        count = min(len(draft), len(wanted.distributions))
        worst = max(worst, float((draft.distributions[:count] - torch.stack(wanted.distributions)[:count]).abs().max()))
        if wanted.survival:
            worst = max(worst, float((torch.tensor(draft.survival[:count]) - torch.tensor(wanted.survival[:count])).abs().max()))
    return worst


@pytest.mark.parametrize(("kind", "trap"), CASES)
def test_the_fault_would_be_seen(
    kind: str, trap: str, target: Any, stored: Callable[..., Any], drafted: Callable[[str], list[Any]]
) -> None:
    made = stored(kind).made
    assert distance(drafted(kind), Reference(made, target.model)) < 1e-5
    assert distance(drafted(kind), Reference(made, target.model, trap)) > 1e-2
