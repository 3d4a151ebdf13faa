"""Every head drafts what a straight-line implementation drafts, over rounds in which some drafts are accepted, some in part, some not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draft_checkpoints import KINDS
from draft_reference import Reference
from draft_runs import Proposal, run

from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams


def requests(count: int = 4, **options: Any) -> list[Request]:
    """Prompts of several lengths; the second one begins like the first, the last one is a single token."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in (21, 9, 35, 1)]
    prompts[1] = prompts[0][:17] + prompts[1]
    params = SamplingParams(max_tokens=24, ignore_eos=True, **options)
    return [Request(i, prompt, params, draw_key=7000 + i) for i, prompt in enumerate(prompts[:count])]


def compare(proposals: list[Proposal], reference: Reference, with_distributions: bool = False) -> int:
    """Hold every draft against the reference; returns how many there were."""
    count = 0
    for proposal in proposals:
        wanted = reference.draft(proposal.tokens, min(proposal.room, limit_of(reference)), proposal.request, proposal.index)
        assert proposal.draft is not None
        if not with_distributions:  # they are drawn with other noise
            assert list(proposal.draft.token_ids) == wanted.tokens
        if wanted.survival:
            torch.testing.assert_close(torch.tensor(proposal.draft.survival), torch.tensor(wanted.survival), rtol=0, atol=1e-5)
        if with_distributions and proposal.draft.distributions is not None:
            same = [a == b for a, b in zip(proposal.draft.token_ids, wanted.tokens, strict=True)]
            upto = 1 + (same.index(False) if False in same else len(same))
            torch.testing.assert_close(proposal.draft.distributions[:upto], torch.stack(wanted.distributions)[:upto], rtol=1e-4, atol=1e-5)
        count += 1
    return count


def limit_of(reference: Reference) -> int:
    truth = reference.truth
    return 5 if truth.method == "eagle3" else truth.block - (0 if truth.anchor_first else 1)


@pytest.mark.parametrize("kind", list(KINDS))
def test_drafts_equal_the_straight_line_ones(kind: str, target: Any, stored: Callable[..., Any]) -> None:
    """Chunked prompts, shared beginnings, rejected drafts behind which the context must not grow, preemption in a small pool."""
    draft = stored(kind)
    plain = run(target.engine, requests(), block_size=16).outputs
    got = run(
        target.engine, requests(), draft.build(), answers=plain, stagger=True, block_size=16, max_num_batched_tokens=32, max_num_seqs=4,
        kv_cache_memory_bytes=18 * blocks_bytes(draft, target),
    )  # fmt: skip
    assert got.outputs == plain
    assert got.speculator is not None
    assert compare(got.speculator.proposals, Reference(draft.made, target.model)) > 20
    assert {0, 1, 2} <= set(got.speculator.accepted)


def blocks_bytes(draft: Any, target: Any) -> int:
    """Bytes of a block of target and drafter together."""
    from dspark.runtime.execution.loader import load_model
    from dspark.runtime.kv.pool import bytes_per_block
    from dspark.runtime.sampling.sampler import Sampler

    model = load_model(target.engine)
    return bytes_per_block(model.config, 16, torch.float32) + int(draft.build()(model, Sampler(frozenset()), 256).bytes_per_block)
