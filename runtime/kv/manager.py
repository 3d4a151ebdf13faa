"""Gives sequences their KV blocks: prefix sharing, growth, copy-on-write, rewinding, release. Integers only; no tensor is touched here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dspark.runtime.kv.allocator import BlockAllocator
from dspark.runtime.kv.prefix_index import ROOT, PrefixIndex

MIN_ALIKE = 4
"""Tokens in common from which copying a block costs less than computing them."""


@dataclass
class BlockTable:
    """The blocks of one sequence, in order of position, and how far they are entered in the prefix index."""

    blocks: list[int] = field(default_factory=list)
    node: int = ROOT
    num_registered: int = 0


class HoldsBlocks(Protocol):
    """What the manager needs of a sequence."""

    token_ids: list[int]
    table: BlockTable
    cache_salt: int


class KVCacheManager:
    """Blocks for sequences out of one pool.

    copies: block copies (source, target) that the step must make before it writes: filled by `extend`, emptied by `take_copies`.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, spare_untouched: bool = False) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.allocator = BlockAllocator(num_blocks, spare_untouched)
        self.index = PrefixIndex(block_size)
        self.peak_held = 0
        self._copies: list[tuple[int, int]] = []

    @property
    def num_blocks(self) -> int:
        return self.allocator.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, seq: HoldsBlocks, max_tokens: int) -> int:
        """Give a sequence without blocks those that hold its beginning already; returns how many of its tokens they cover.

        Whole blocks are shared, and only those within the first max_tokens, so that the sequence never writes into one of them. Where the
        next block of another sequence begins like this one's, that beginning is copied into a block of its own (MIN_ALIKE tokens or more).
        """
        assert not seq.table.blocks, "a sequence that holds blocks cannot match a prefix"
        root = self.index.root(seq.cache_salt)
        seq.table.node = root
        if not self.enable_prefix_caching:
            return 0
        blocks, node = self.index.match(seq.token_ids, root, max_tokens)
        for block in blocks:
            self.allocator.retain(block)
        seq.table.blocks = list(blocks)
        seq.table.node = node
        seq.table.num_registered = len(blocks)
        num_shared = len(blocks) * self.block_size
        return num_shared + self._copy_alike(seq, num_shared, max_tokens)

    def _copy_alike(self, seq: HoldsBlocks, start: int, end: int) -> int:
        """Copy the beginning of the next block from another sequence's block, if one begins alike; returns the tokens that are there then.

        The source may be given to somebody else in this very step: the step's copies are made first, in order, before its writes.
        """
        source, num_alike = self.index.nearest(seq.table.node, seq.token_ids, start, end)
        if num_alike < MIN_ALIKE or self.allocator.num_available < 2:
            return 0
        self.allocator.retain(source)  # so that the copy does not land on it
        target = self._allocate()
        self._release(source)
        self._copies.append((source, target))
        seq.table.blocks.append(target)
        return num_alike

    def num_cached_blocks(self, seq: HoldsBlocks, max_tokens: int) -> tuple[int, int]:
        """How many blocks `match_prefix` would find, and how many of them are idle now (and would no longer be available)."""
        if not self.enable_prefix_caching:
            return 0, 0
        blocks, _ = self.index.match(seq.token_ids, self.index.root(seq.cache_salt), max_tokens)
        return len(blocks), sum(self.allocator.ref_count(block) == 0 for block in blocks)

    def fork(self, parent: HoldsBlocks, child: HoldsBlocks, num_tokens: int) -> None:
        """Let a sequence without blocks share its sibling's first num_tokens, whether or not their last block is full."""
        assert not child.table.blocks
        shared = parent.table.blocks[: self.blocks_for(num_tokens)]
        for block in shared:
            self.allocator.retain(block)
        full = num_tokens // self.block_size
        child.table = BlockTable(list(shared), self.index.root(child.cache_salt))
        if parent.table.num_registered == full:
            child.table.node, child.table.num_registered = parent.table.node, full

    def extend(self, seq: HoldsBlocks, num_computed: int, num_total: int) -> bool:
        """Make the positions num_computed .. num_total - 1 writable: add blocks, and copy those that others hold too. A block that holds
        what others may find, and that nobody else holds any more, is found no longer: a sibling filled it, this one has a part of it.

        False (and nothing is changed) when the pool has too few blocks.
        """
        blocks = seq.table.blocks
        num_new = self.blocks_for(num_total) - len(blocks)
        written = range(num_computed // self.block_size, min(len(blocks), self.blocks_for(num_total)))
        shared = [i for i in written if self.allocator.ref_count(blocks[i]) > 1]
        if max(num_new, 0) + len(shared) > self.allocator.num_available:
            return False
        for i in written:
            if self.allocator.ref_count(blocks[i]) == 1 and blocks[i] in self.index:
                self.index.forget(blocks[i])
        for i in shared:
            copy = self._allocate()
            self._copies.append((blocks[i], copy))
            self.allocator.release(blocks[i], blocks[i] in self.index)
            blocks[i] = copy
        for _ in range(num_new):
            blocks.append(self._allocate())
        self.peak_held = max(self.peak_held, self.allocator.num_held)
        return True

    def register_full_blocks(self, seq: HoldsBlocks, num_tokens: int) -> None:
        """Enter the blocks that are full once num_tokens are stored. May be called before the step that stores them has run:
        within a step all keys and values of a layer are stored before any attention reads them."""
        table = seq.table
        if not self.enable_prefix_caching:
            return
        for i in range(table.num_registered, num_tokens // self.block_size):
            table.node = self.index.register(table.node, seq.token_ids, i * self.block_size, table.blocks[i])
            table.num_registered = i + 1

    def forget_unwritten(self, seq: HoldsBlocks, num_tokens: int) -> bool:
        """Take the sequence's blocks that are not full with its first num_tokens out of the index: the step that was to fill them has not
        run. Says whether any was entered; then its holders' chains are broken, and they must be released."""
        entered = seq.table.blocks[num_tokens // self.block_size : seq.table.num_registered]
        for block in entered:
            if block in self.index:
                self.index.forget(block)
        return bool(entered)

    def rewind(self, seq: HoldsBlocks, num_tokens: int) -> None:
        """Give back the blocks past num_tokens (rejected drafts). No token of a registered block may be among the rejected ones."""
        keep = self.blocks_for(num_tokens)
        assert num_tokens >= seq.table.num_registered * self.block_size, "a registered block cannot be rewound"
        while len(seq.table.blocks) > keep:
            self._release(seq.table.blocks.pop())

    def release(self, seq: HoldsBlocks) -> None:
        """Give all blocks back. The last ones are given back first, so that chains are evicted from their ends."""
        while seq.table.blocks:
            self._release(seq.table.blocks.pop())
        seq.table = BlockTable()

    def take_copies(self) -> list[tuple[int, int]]:
        """The pending copies (source, target), which the caller now owes."""
        self.index.next_step()
        copies, self._copies = self._copies, []
        return copies

    def check_integrity(self, sequences: list[HoldsBlocks]) -> None:
        """Raise AssertionError unless the reference counts are just what these sequences hold."""
        self.allocator.check_integrity()
        counts = [0] * self.num_blocks
        for seq in sequences:
            assert len(set(seq.table.blocks)) == len(seq.table.blocks), "a sequence holds a block twice"
            for block in seq.table.blocks:
                counts[block] += 1
        assert counts == [self.allocator.ref_count(block) for block in range(self.num_blocks)], "reference counts differ from the holders"

    def _allocate(self) -> int:
        block, was_idle = self.allocator.allocate()
        if was_idle:
            self.index.forget(block)
        return block

    def _release(self, block: int) -> None:
        self.allocator.release(block, block in self.index)
