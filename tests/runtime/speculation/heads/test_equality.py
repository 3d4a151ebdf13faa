"""Every head drafts what a straight-line implementation drafts, over rounds in which some drafts are accepted, some in part, some not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draft_checkpoints import KINDS
from draft_reference import Reference
from draft_runs import block_bytes, compare, requests, run

from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams


@pytest.mark.parametrize("kind", list(KINDS))
def test_drafts_equal_the_straight_line_ones(kind: str, target: Any, stored: Callable[..., Any]) -> None:
    """Chunked prompts, shared beginnings, rejected drafts behind which the context must not grow, preemption in a small pool."""
    draft = stored(kind)
    asked = requests(max_tokens=40)
    plain = run(target.engine, asked).outputs
    settings = {"max_num_batched_tokens": 20, "max_num_seqs": 4, "kv_cache_memory_bytes": 5 * block_bytes(target.engine, draft)}
    got = run(target.engine, asked, draft.build(), answers=plain, **settings)
    assert got.outputs == plain
    assert got.engine.scheduler.num_preemptions > 0
    assert got.engine.metrics()["cached_tokens"] > 0
    compare(got.speculator.proposals, Reference(draft.made, target.model))
    assert 0 in got.speculator.accepted and len(set(got.speculator.accepted)) > 2


@pytest.mark.parametrize("kind", list(KINDS))
def test_distributions_are_those_that_tokens_are_drawn_from(kind: str, target: Any, stored: Callable[..., Any]) -> None:
    """The rejection rule is biased by a q that is not the very one: without the Markov bias, at another temperature, before top-k."""
    draft, asked = stored(kind), requests(14, temperature=0.7, top_k=40)
    got = run(target.engine, asked, draft.build(keep_distributions=True))
    compare(got.speculator.proposals, Reference(draft.made, target.model))


@pytest.mark.parametrize("kind", ["deepspec-vanilla", "eagle3-original"])
def test_drafts_share_the_noise_of_the_target_unless_distributions_are_kept(kind: str, target: Any, stored: Callable[..., Any]) -> None:
    """Coupled: the same noise, so that a draft is a function of its context. The rejection rule needs draws that are independent of it."""
    draft, asked = stored(kind), requests(12, temperature=1.0)
    coupled = run(target.engine, asked, draft.build())
    compare(coupled.speculator.proposals, Reference(draft.made, target.model))
    apart = run(target.engine, asked, draft.build(keep_distributions=True))
    assert coupled.outputs == apart.outputs
    pairs = list(zip(coupled.speculator.proposals[:4], apart.speculator.proposals[:4], strict=True))
    assert any(a.draft.token_ids != b.draft.token_ids for a, b in pairs)


@pytest.mark.parametrize("kind", ["deepspec-gated", "eagle3-deepspec"])
def test_answers_that_fork_a_prompt_take_their_context_along(kind: str, target: Any, stored: Callable[..., Any]) -> None:
    """The block where the prompt ends is copied for each answer, in the drafter's layers too."""
    draft = stored(kind)
    asked = [Request(0, requests()[0].prompt_token_ids, SamplingParams(max_tokens=16, ignore_eos=True, n=4, temperature=1.0), draw_key=3)]
    plain = run(target.engine, asked).outputs
    got = run(target.engine, asked, draft.build(), answers=plain, max_num_batched_tokens=21, max_num_seqs=4)
    assert got.outputs == plain
    compare(got.speculator.proposals, Reference(draft.made, target.model))


def test_prompts_in_chunks(target: Any, stored: Callable[..., Any]) -> None:
    """The context must not depend on the steps in which it was computed."""
    for kind in ("deepspec-dflash", "eagle3-original"):
        draft = stored(kind)
        got = run(target.engine, requests(), draft.build(), max_num_batched_tokens=16, max_num_seqs=1)
        compare(got.speculator.proposals, Reference(draft.made, target.model))


@pytest.mark.parametrize(("heads", "kv_heads", "block"), [(16, 1, 5), (12, 1, 16), (4, 4, 2), (2, 1, 1)])
def test_blocks_of_any_shape(heads: int, kv_heads: int, block: int, target: Any, stored: Callable[..., Any]) -> None:
    """More rows times heads than one call takes are cut into several; a block of one row is a draft of one token."""
    draft = stored("deepspec-vanilla", heads=heads, kv_heads=kv_heads, block=block)
    got = run(target.engine, requests(), draft.build())
    compare(got.speculator.proposals, Reference(draft.made, target.model))


def test_a_drafter_of_more_sequences_than_one_pass_takes(target: Any, stored: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from dspark.runtime.speculation.heads import block, eagle3

    monkeypatch.setattr(block, "LOGITS_AT_ONCE", 1)
    monkeypatch.setattr(eagle3, "AT_ONCE", 3)
    for kind in ("deepspec-rnn", "eagle3-specforge"):
        draft = stored(kind)
        got = run(target.engine, requests(), draft.build())
        compare(got.speculator.proposals, Reference(draft.made, target.model))


@pytest.mark.parametrize("kind", ["deepspec-vanilla", "eagle3-specforge"])
def test_long_contexts_over_many_pages(kind: str, target: Any, stored: Callable[..., Any]) -> None:
    """A block seeded one place off drafts well in short contexts and collapses in long ones."""
    draft = stored(kind)
    prompt = torch.randint(3, 320, (200,), generator=torch.Generator().manual_seed(8)).tolist()
    asked = [Request(0, prompt, SamplingParams(max_tokens=30, ignore_eos=True))]
    got = run(target.engine, asked, draft.build(), max_num_batched_tokens=64)
    compare(got.speculator.proposals, Reference(draft.made, target.model))
