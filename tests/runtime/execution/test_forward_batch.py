"""Where the tokens of a step lie, worked out by hand: a prompt's part, a chain, a tree."""

from __future__ import annotations

import pytest
import torch

from dspark.runtime.execution.forward_batch import accepted_moves, build_forward_batch
from dspark.runtime.scheduling.plan import ScheduledSequence, SchedulerOutput
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.draft import ROOT, Draft, Verified

BLOCK = 4


def sequence(num_tokens: int, num_computed: int, blocks: list[int], rope_len: int = 1) -> Sequence:
    seq = Sequence(Request(0, list(range(10, 10 + num_tokens)), SamplingParams()), 0, 0)
    seq.num_computed, seq.table.blocks, seq.rope_len = num_computed, blocks, rope_len
    return seq


def chunk() -> ScheduledSequence:
    return ScheduledSequence(sequence(9, 1, [7, 8, 9]), 3)


def tree() -> ScheduledSequence:
    """6 tokens, 5 of them computed. The newest -> 50 -> 52 -> 54, and -> 51 -> 53."""
    draft = Draft((50, 51, 52, 53, 54), (0.5,) * 5, "a", (ROOT, ROOT, 0, 1, 2))
    return ScheduledSequence(sequence(6, 5, [2, 5, 3], rope_len=8), 1, draft)


def chain() -> ScheduledSequence:
    return ScheduledSequence(sequence(3, 2, [6, 4]), 1, Draft((60, 61), (0.5,) * 2, "a"))


def test_nodes_take_slots_in_order_and_positions_by_depth() -> None:
    batch = build_forward_batch(SchedulerOutput([chunk(), tree(), chain()]), BLOCK, "cpu")
    attention = batch.attention
    assert batch.token_ids.tolist() == [11, 12, 13, 15, 50, 51, 52, 53, 54, 12, 60, 61]
    assert attention.query_start.tolist() == [0, 3, 9, 12] and attention.context_lens.tolist() == [4, 11, 5]
    assert attention.positions.tolist() == [1, 2, 3, 5, 6, 6, 7, 7, 8, 2, 3, 4]
    assert attention.slot_mapping.tolist() == [29, 30, 31, 21, 22, 23, 12, 13, 14, 26, 27, 16]
    assert batch.rope_lengths.tolist() == [2, 3, 4, 8, 8, 8, 8, 8, 9, 3, 4, 5], "each token's own length, the sequence's at least"
    assert batch.sample_rows.tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert attention.tree is not None
    assert attention.tree.start.tolist() == [4, 6, 5], "the context's end where there is no tree"
    assert attention.tree.visible.tolist() == [0, 0, 0, 0, 0b1, 0b10, 0b101, 0b1010, 0b10101, 0, 0, 0]
    assert batch.slots_before is not None
    assert batch.slots_before.tolist() == [28, 29, 30, 20, 21, 21, 22, 23, 12, 25, 26, 27]


def test_a_step_without_trees_has_no_mask() -> None:
    batch = build_forward_batch(SchedulerOutput([chunk(), chain()]), BLOCK, "cpu")
    assert batch.attention.tree is None and batch.slots_before is None
    assert torch.equal(batch.attention.positions, torch.tensor([1, 2, 3, 2, 3, 4]))


def test_an_accepted_path_moves_to_its_positions() -> None:
    """Nodes 1 and 3 stood at slots 23 and 13, their positions' slots are 22 and 23; a chain stays."""
    gained = [Verified([51, 53, 9], None, (1, 3)), Verified([60, 61, 9], None, (0, 1))]
    assert accepted_moves([tree(), chain()], gained, BLOCK) == [(23, 22), (13, 23)]
    assert accepted_moves([tree()], [Verified([50, 52, 54, 1], None, (0, 2, 4))], BLOCK) == [(12, 23), (14, 12)]
    assert accepted_moves([tree()], [Verified([1], None, ())], BLOCK) == []


def test_more_nodes_than_a_mask_has_bits_are_a_fault() -> None:
    item = ScheduledSequence(sequence(1, 0, list(range(17))), 1, Draft((1,) * 64, (0.5,) * 64, "a", (ROOT,) * 64))
    with pytest.raises(AssertionError, match="more nodes"):
        build_forward_batch(SchedulerOutput([item]), BLOCK, "cpu")
