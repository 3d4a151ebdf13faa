"""A head's context after trees of other drafts: rejected branches leave nothing in it, accepted paths lie at their positions."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
from draft_reference import Reference
from draft_runs import MixedSpeculator, block_bytes, compare, requests, run

from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.draft import ROOT, Draft


def comb(self: MixedSpeculator, seq: Sequence, room: int, draft: Draft | None) -> Draft | None:
    """The answer to come with a wrong sibling before each of its tokens, in place of what the head drafted; wrong from some depth on."""
    answers = self.answers.get(seq.request.request_id)
    if answers is None or draft is None:
        return draft
    coming = answers[seq.index][seq.num_output_tokens :][: min(room, 12) // 2]
    wrong_from = zlib.crc32(repr((seq.token_ids, seq.index)).encode()) % (len(coming) + 2)
    tokens: list[int] = []
    parents: list[int] = []
    for depth, token in enumerate(coming):
        last = len(tokens) - 1 if depth else ROOT
        tokens += [(token + 2) % 320, token if depth < wrong_from else (token + 1) % 320]
        parents += [last, last]
    return Draft(tuple(tokens), (0.5,) * len(tokens), "comb", tuple(parents)) if tokens else None


@pytest.mark.parametrize("kind", ["deepspec-vanilla", "eagle3-original", "eagle3-deepspec"])
def test_drafts_equal_the_straight_line_ones_after_trees(
    kind: str, target: Any, stored: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MixedSpeculator, "mixed", comb)
    draft, asked = stored(kind), requests(max_tokens=40)
    plain = run(target.engine, asked).outputs
    settings = {"max_num_batched_tokens": 40, "max_num_seqs": 4, "kv_cache_memory_bytes": 6 * block_bytes(target.engine, draft)}
    got = run(target.engine, asked, draft.build(), answers=plain, **settings)
    assert got.outputs == plain
    assert got.engine.scheduler.num_preemptions > 0
    assert {0, 1, 2} <= set(got.speculator.accepted)
    compare(got.speculator.proposals, Reference(draft.made, target.model))
