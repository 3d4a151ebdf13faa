"""Which KV blocks are free, how many holders each has, and which free ones still hold reusable content."""

from __future__ import annotations

from collections import OrderedDict


class BlockAllocator:
    """Book-keeping of `num_blocks` block ids 0 .. num_blocks - 1, in integers only.

    A block is in exactly one state: *free* (no holder, nothing worth keeping), *idle* (no holder, content kept for the prefix cache until
    the room is needed) or *held* (reference count >= 1). Recently freed blocks are handed out first: their memory is warm, and memory
    that was never needed is never touched.

    spare_untouched: on a CPU a block costs memory from its first use on; then the oldest idle blocks are reused before untouched ones once
    there are more idle blocks than a quarter of the held ones (and MIN_IDLE).
    """

    MIN_IDLE = 64

    def __init__(self, num_blocks: int, spare_untouched: bool = False) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, must be at least 1")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._ref_counts = [0] * num_blocks
        self._spare_untouched = spare_untouched
        self._num_touched = 0  # blocks 0 .. this - 1 have been handed out at least once

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self) -> tuple[int, bool]:
        """A block with one holder, and whether it was idle: then its cached content must be forgotten by the caller.

        Raises IndexError when no block is available.
        """
        if self._free and not self._prefers_idle():
            block, was_idle = self._free.pop(), False
            self._num_touched = max(self._num_touched, block + 1)
        elif self._idle:
            block, was_idle = self._idle.popitem(last=False)[0], True
        else:
            raise IndexError("no KV block is available")
        self._ref_counts[block] = 1
        return block, was_idle

    def _prefers_idle(self) -> bool:
        """Whether the next free block is untouched and enough idle ones are there to take instead."""
        return self._spare_untouched and self._free[-1] >= self._num_touched and len(self._idle) > max(self.MIN_IDLE, self.num_held // 4)

    def retain(self, block: int) -> None:
        """One more holder of a held or idle block."""
        if self._ref_counts[block] == 0:
            if block not in self._idle:
                raise ValueError(f"block {block} is free and cannot be shared")
            del self._idle[block]
        self._ref_counts[block] += 1

    def release(self, block: int, keep_content: bool) -> None:
        """One holder less. The last one leaves the block idle (keep_content) or free."""
        if self._ref_counts[block] == 0:
            raise ValueError(f"block {block} is released but has no holder")
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if keep_content:
                self._idle[block] = None
            else:
                self._free.append(block)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is in exactly one state."""
        free, idle = set(self._free), set(self._idle)
        held = {block for block, count in enumerate(self._ref_counts) if count > 0}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & idle and not free & held and not idle & held, "a block is in two states"
        assert len(free) + len(idle) + len(held) == self.num_blocks, "a block is lost"
        assert all(count >= 0 for count in self._ref_counts)
