"""From the plan's ints to the model's inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from dspark.kernels.batch import MAX_TREE_NODES
from dspark.kernels.ops import AttentionBatch, TreeMask
from dspark.kernels.staging import stage
from dspark.runtime.scheduling.plan import ScheduledSequence, SchedulerOutput
from dspark.runtime.speculation.draft import Verified


@dataclass
class ForwardBatch:
    """token_ids int64 [T].

    rope_lengths int64 [T]: length of each token's sequence as dynamic rope and longrope count it: Sequence.rope_len (the prompt's),
    then position + 1. sample_rows int64 [rows]: tokens whose logits are wanted, in the order of SchedulerOutput.sampling: a sequence's
    newest token, then those of its draft.
    slots_before int64 [T]: of a step with draft trees, the slot of the token before each one: of its parent, if it is a node, and its own
    at position 0. None without trees: it is the one before in position.
    longest: the largest of rope_lengths, known on the host.
    source_rows int64 [T]: of a token that the step before draws, its row there; token_ids has 0 in its place. -1 for all others, None
    without any. copies int64 [n, 2] each: the plan's block copies (source, target), in groups that are made one after the other;
    pairs: the same on the host, in their order.
    """

    token_ids: torch.Tensor
    rope_lengths: torch.Tensor
    sample_rows: torch.Tensor
    attention: AttentionBatch
    longest: int
    slots_before: torch.Tensor | None = None
    source_rows: torch.Tensor | None = None
    copies: list[torch.Tensor] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Laid:
    """A step's inputs on the host: arrays by their names in ForwardBatch, AttentionBatch and TreeMask (start: "tree_start"; absent where it
    is None there). copies: the plan's. Maxima over the sequences, and over rope_lengths."""

    arrays: dict[str, np.ndarray]
    copies: list[tuple[int, int]]
    max_query_len: int
    max_context_len: int
    longest: int


def build_forward_batch(plan: SchedulerOutput, block_size: int, device: str) -> ForwardBatch:
    """A step's inputs on the device, in one copy."""
    return put_there(lay_out(plan, block_size), device)


def lay_out(plan: SchedulerOutput, block_size: int) -> Laid:
    """Lay the scheduled tokens out, sequence after sequence. The nodes of a draft lie in slots behind one another, in their own order; in a
    tree their positions go by depth."""
    items = plan.scheduled
    counts = np.asarray([item.num_query_tokens for item in items], np.int64)
    computed = np.asarray([item.start for item in items], np.int64)
    query_start = np.zeros(len(items) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    context_lens = computed + counts
    tables = block_tables([item.seq.table.blocks for item in items], context_lens, block_size)
    token_ids = np.empty(int(query_start[-1]), np.int64)
    for i, item in enumerate(items):
        seq = item.seq
        start = item.start
        if item.source_row >= 0:
            token_ids[query_start[i]] = 0
        elif item.num_tokens == 1:
            token_ids[query_start[i]] = seq.token_ids[start]
        else:
            token_ids[query_start[i] : query_start[i] + item.num_tokens] = seq.token_ids[start : start + item.num_tokens]
        if item.draft:
            token_ids[query_start[i] + item.num_tokens : query_start[i + 1]] = item.draft.token_ids
    owner = np.repeat(np.arange(len(items)), counts)
    indices = np.arange(token_ids.shape[0]) - query_start[owner] + computed[owner]

    def slots(of: np.ndarray) -> np.ndarray:
        return tables[owner, of // block_size].astype(np.int64) * block_size + of % block_size

    trees = _Trees(items, query_start, context_lens, indices) if any(item.draft and item.draft.parents for item in items) else None
    positions = indices if trees is None else trees.positions
    rope_lens = np.asarray([item.seq.rope_len for item in items], np.int64)
    ends = [np.arange(query_start[i] + item.num_tokens - 1, query_start[i + 1]) for i, item in enumerate(items) if item.samples]
    sample_rows = np.concatenate(ends).astype(np.int64) if ends else np.empty(0, np.int64)

    rope_lengths = np.maximum(rope_lens[owner], positions + 1)
    arrays = {
        "token_ids": token_ids,
        "rope_lengths": rope_lengths,
        "sample_rows": sample_rows,
        "query_start": query_start,
        "context_lens": context_lens.astype(np.int32),
        "block_tables": tables,
        "slot_mapping": slots(indices),
        "positions": positions,
    }
    if trees is not None:
        arrays |= {"visible": trees.visible, "tree_start": trees.start, "slots_before": slots(trees.before)}
    sources = np.asarray([item.source_row for item in items], np.int64)
    if (sources >= 0).any():
        arrays["source_rows"] = sources[owner]
    return Laid(arrays, plan.copies, int(counts.max()), int(context_lens.max()), int(rope_lengths.max()))


def block_tables(blocks: list[list[int]], lens: np.ndarray, block_size: int) -> np.ndarray:
    """int32 [S, max_blocks]: each sequence's blocks of its first lens int64 [S] tokens, 0 behind them."""
    used = -(-lens // block_size)
    tables = np.zeros((len(blocks), int(used.max())), np.int32)
    for i, own in enumerate(blocks):
        tables[i, : used[i]] = own[: used[i]]
    return tables


def put_there(laid: Laid, device: str) -> ForwardBatch:
    """One copy to the device."""
    arrays = {**laid.arrays, "copies": np.asarray(laid.copies, np.int64)} if laid.copies else laid.arrays
    there = dict(zip(arrays, stage(list(arrays.values()), device), strict=True))
    batch = batch_of(there, laid.max_query_len, laid.max_context_len, laid.longest)
    batch.copies, batch.pairs = copy_groups(laid.copies, there.get("copies")), laid.copies
    return batch


def batch_of(there: dict[str, torch.Tensor], max_query_len: int, max_context_len: int, longest: int) -> ForwardBatch:
    """The batch of arrays that are on the device."""
    return ForwardBatch(
        token_ids=there["token_ids"],
        rope_lengths=there["rope_lengths"],
        sample_rows=there["sample_rows"],
        attention=AttentionBatch(
            query_start=there["query_start"],
            context_lens=there["context_lens"],
            block_tables=there["block_tables"],
            slot_mapping=there["slot_mapping"],
            positions=there["positions"],
            max_query_len=max_query_len,
            max_context_len=max_context_len,
            tree=TreeMask(there["visible"], there["tree_start"]) if "visible" in there else None,
        ),
        longest=longest,
        slots_before=there.get("slots_before"),
        source_rows=there.get("source_rows"),
    )


def copy_groups(pairs: list[tuple[int, int]], copies: torch.Tensor | None) -> list[torch.Tensor]:
    """All copies at once, or each by itself where one reads what another has written."""
    if copies is None:
        return []
    overlapping = bool({source for source, _ in pairs} & {target for _, target in pairs})
    return list(copies.split(1)) if overlapping else [copies]


class _Trees:
    """What a step with draft trees has besides. indices, before int64 [T]: key index of each token, and of the token before it."""

    def __init__(self, items: list[ScheduledSequence], query_start: np.ndarray, context_lens: np.ndarray, indices: np.ndarray) -> None:
        self.positions, self.before = indices.copy(), np.maximum(indices - 1, 0)
        self.visible = np.zeros(indices.shape[0], np.int64)
        self.start = context_lens.astype(np.int32)
        for i, item in enumerate(items):
            if item.draft is None or item.draft.parents is None:
                continue
            assert len(item.draft) <= MAX_TREE_NODES, "the tree has more nodes than a mask has bits"
            nodes = slice(query_start[i + 1] - len(item.draft), query_start[i + 1])
            masks = item.draft.masks()
            start = int(context_lens[i]) - len(item.draft)
            self.start[i] = start
            self.visible[nodes] = masks
            self.positions[nodes] = [start + mask.bit_count() - 1 for mask in masks]
            self.before[nodes] = [start + parent for parent in item.draft.parents]  # ROOT is -1, and the newest token stands there


def accepted_moves(sampling: list[ScheduledSequence], gained: list[Verified], block_size: int) -> list[tuple[int, int]]:
    """(source slot, target slot) of accepted nodes that do not lie at their positions yet: none for chains, in path order for trees."""
    moves = []
    for item, verified in zip(sampling, gained, strict=True):
        end, blocks = item.start + item.num_tokens, item.seq.table.blocks
        for depth, node in enumerate(verified.nodes):
            if node != depth:
                moves.append((_slot(blocks, end + node, block_size), _slot(blocks, end + depth, block_size)))
    return moves


def _slot(blocks: list[int], index: int, block_size: int) -> int:
    return blocks[index // block_size] * block_size + index % block_size
