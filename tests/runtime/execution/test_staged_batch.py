"""A step's inputs reach a device in one copy."""

from __future__ import annotations

import torch
from host_copies import Copies

from dspark.runtime.execution.forward_batch import build_forward_batch
from dspark.runtime.scheduling.plan import ScheduledSequence, SchedulerOutput
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.draft import ROOT, Draft


def sequence(num_tokens: int, num_computed: int, blocks: list[int]) -> Sequence:
    seq = Sequence(Request(0, list(range(num_tokens)), SamplingParams()), 0, 0)
    seq.num_computed, seq.table.blocks = num_computed, blocks
    return seq


def plan() -> SchedulerOutput:
    """A chunk of a prompt, a decode whose token is on the device, a draft tree, and block copies."""
    fed = sequence(5, 5, [1, 2])
    fed.num_pending, fed.pending_row = 1, 3
    tree = Draft((7, 8, 9), (0.5,) * 3, "test", (ROOT, ROOT, 0))
    items = [
        ScheduledSequence(sequence(9, 2, [3, 4, 5]), 4),
        ScheduledSequence(fed, 1),
        ScheduledSequence(sequence(4, 3, [6, 7]), 1, tree),
    ]
    return SchedulerOutput(items, copies=[(0, 1), (2, 3)])


def test_a_step_is_one_copy() -> None:
    """Thirteen arrays in thirteen copies cost more than a decode step of a small model."""
    with Copies() as copies:
        batch = build_forward_batch(plan(), 4, "meta")
    assert len(copies.sizes) == 1
    parts = [batch.token_ids, batch.rope_lengths, batch.sample_rows, batch.slots_before, batch.source_rows, *batch.copies]
    attention = batch.attention
    parts += [attention.query_start, attention.context_lens, attention.block_tables, attention.slot_mapping, attention.positions]
    parts += [attention.tree.visible, attention.tree.start]
    assert all(part.device.type == "meta" for part in parts)
    assert len({part.untyped_storage()._cdata for part in parts}) == 1
    assert sum(part.nbytes for part in parts) <= copies.sizes[0] < sum(part.nbytes for part in parts) + 16 * len(parts)


def test_both_ways_lay_out_the_same_batch() -> None:
    there, here = build_forward_batch(plan(), 4, "cpu:0"), build_forward_batch(plan(), 4, "cpu")
    for name in ("token_ids", "rope_lengths", "sample_rows", "slots_before", "source_rows"):
        assert torch.equal(getattr(there, name), getattr(here, name)), name
    for name in ("query_start", "context_lens", "block_tables", "slot_mapping", "positions"):
        assert torch.equal(getattr(there.attention, name), getattr(here.attention, name)), name
    assert torch.equal(there.attention.tree.visible, here.attention.tree.visible)
    assert there.longest == here.longest == int(here.rope_lengths.max())


def test_a_token_that_is_still_to_be_drawn_is_named_by_its_row() -> None:
    batch = build_forward_batch(plan(), 4, "cpu")
    assert batch.source_rows.tolist() == [-1, -1, -1, -1, 3, -1, -1, -1, -1]
    assert batch.token_ids[4] == 0 and batch.attention.positions[4] == 5
    assert batch.sample_rows.tolist()[0] == 4, "it is computed like any other token, and the next one is drawn"


def test_copies_that_read_each_other_are_made_one_after_the_other() -> None:
    apart, chained = plan(), plan()
    chained.copies = [(0, 1), (1, 2)]
    assert [group.tolist() for group in build_forward_batch(apart, 4, "cpu").copies] == [[[0, 1], [2, 3]]]
    assert [group.tolist() for group in build_forward_batch(chained, 4, "cpu").copies] == [[[0, 1]], [[1, 2]]]
