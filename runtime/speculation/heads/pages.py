"""A drafter's own layers behind the block ids of its target: caches, and where the rows of a draft pass lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dspark.kernels.ops import AttentionBatch, Kernels
from dspark.kernels.staging import stage
from dspark.runtime.execution.graphs import Recordings, rounded, rounded_context, to_length, waits_for_host
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.heads.chains import DraftChains

LayerCache = tuple[torch.Tensor, torch.Tensor]


class DraftPages:
    """Key and value caches of some layers, with the target's block ids. spare_blocks: more of them, behind the pool's, for the drafter."""

    def __init__(self, kernels: Kernels, num_layers: int, spare_blocks: int = 0) -> None:
        self.kernels, self.num_layers, self.spare_blocks = kernels, num_layers, spare_blocks
        self.caches: list[LayerCache] = []
        self.num_blocks = 0

    @property
    def bytes_per_block(self) -> int:
        facts = self.kernels.facts
        return 2 * self.num_layers * facts.num_kv_heads * facts.block_size * facts.head_dim * facts.dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        """Uninitialised on purpose: on CPU a page of memory counts only once a block in it is used."""
        facts = self.kernels.facts
        self.num_blocks = num_blocks
        shape = (num_blocks + self.spare_blocks, facts.num_kv_heads, facts.block_size, facts.head_dim)
        self.caches = [
            (torch.empty(shape, dtype=facts.dtype, device=facts.device), torch.empty(shape, dtype=facts.dtype, device=facts.device))
            for _ in range(self.num_layers)
        ]

    def why_not_recorded(self) -> str | None:
        """Why storing keys and values, and reading them, cannot be part of a recording, or None."""
        waits = waits_for_host({op: selection.taken for op, selection in self.kernels.selections.items()}, has_experts=False)
        return None if waits is None else f"the drafter's {waits}"

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for k_cache, v_cache in self.caches:
            self.kernels.copy_blocks(k_cache, v_cache, source, target)

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for k_cache, v_cache in self.caches:
            self.kernels.copy_slots(k_cache, v_cache, source, target)


@dataclass(frozen=True)
class PassShape:
    """A shape of passes, see `graphs.Bucket`."""

    num_sequences: int
    rows: int
    max_context_len: int

    def of(self, there: dict[str, torch.Tensor]) -> DraftPass:
        """The pass of arrays that are on the device."""
        return DraftPass(**there, rows=self.rows, max_start=self.max_context_len - self.rows, shape=self)


@dataclass
class DraftPass:
    """Rows that a draft pass computes: `rows` for each of S sequences, at its positions from the newest token's on.

    newest int64 [S]: the newest tokens. tables int32 [S, max_blocks]. starts int64 [S]: position of the first row, the number of tokens
    before it. slots, positions int64 [S * rows]: of each row, sequence after sequence. shape: where it is to be replayed; it may have more
    sequences then.
    """

    newest: torch.Tensor
    tables: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    rows: int
    max_start: int
    shape: PassShape | None = None

    def attention(self, context_lens: torch.Tensor, max_context_len: int, copies: int = 1) -> AttentionBatch:
        """One query for each sequence (for each of `copies` in a row), which sees all of context_lens int32 [S] keys."""
        tables, lens = self.tables, context_lens
        if copies > 1:
            tables, lens = tables.repeat_interleave(copies, 0), lens.repeat_interleave(copies)
        count = lens.shape[0]
        start = torch.arange(count + 1, dtype=torch.int32, device=lens.device)
        return AttentionBatch(start, lens, tables, self.slots, self.positions, 1, max_context_len)


def lay_out(
    sequences: list[Sequence], rows: int, block_size: int, device: str, chains: DraftChains, recordings: Recordings | None = None
) -> DraftPass:
    """Lay out the rows of a pass; each sequence's blocks reach to its last row. What chains want on the device goes in the same copy.
    recordings: of passes, if there are any."""
    starts = np.asarray([seq.num_computed for seq in sequences], np.int64)
    newest = np.asarray([seq.token_ids[-1] for seq in sequences], np.int64)
    used = -(-(starts + rows) // block_size)
    tables = np.zeros((len(sequences), int(used.max())), np.int32)
    for i, seq in enumerate(sequences):
        tables[i, : used[i]] = seq.table.blocks[: used[i]]
    positions = starts[:, None] + np.arange(rows)[None]
    slots = tables[np.arange(len(sequences))[:, None], positions // block_size].astype(np.int64) * block_size + positions % block_size
    own = {"newest": newest, "tables": tables, "starts": starts, "slots": slots.reshape(-1), "positions": positions.reshape(-1)}
    shape = PassShape(rounded(len(sequences)), rows, rounded_context(int(starts.max()) + rows))
    if recordings is not None and recordings.meets(shape):
        packed, *others = stage([recordings.packed(shape, padded_pass(own, shape, block_size)), *chains.arrays], device)
        found = shape.of(recordings.take(shape, packed))
    else:
        tensors = stage([*own.values(), *chains.arrays], device)
        others = tensors[len(own) :]
        there = dict(zip(own, tensors, strict=False))
        found = DraftPass(**there, rows=rows, max_start=int(starts.max()), shape=None)
    chains.place(others)
    return found


def padded_pass(own: dict[str, np.ndarray], shape: PassShape, block_size: int) -> dict[str, np.ndarray]:
    """A pass of more sequences. The added ones have no slots, and see what lies in the pool's first block."""
    tables = np.zeros((shape.num_sequences, -(-shape.max_context_len // block_size)), np.int32)
    found = own["tables"]
    tables[: found.shape[0], : found.shape[1]] = found
    num_rows = shape.num_sequences * shape.rows
    return {
        "newest": to_length(own["newest"], shape.num_sequences, 0),
        "tables": tables,
        "starts": to_length(own["starts"], shape.num_sequences, 0),
        "slots": to_length(own["slots"], num_rows, -1),
        "positions": to_length(own["positions"], num_rows, 0),
    }


def by_rows(rows: list[int], at_once: int, kinds: list[bool]) -> Iterator[tuple[int, list[int]]]:
    """Groups of sequences with equally many rows, none of 0, and of one kind, of at most at_once: (rows, indices)."""
    groups: dict[tuple[int, bool], list[int]] = {}
    for i, key in enumerate(zip(rows, kinds, strict=True)):
        if key[0] > 0:
            groups.setdefault(key, []).append(i)
    for (count, _), members in groups.items():
        for start in range(0, len(members), at_once):
            yield count, members[start : start + at_once]
