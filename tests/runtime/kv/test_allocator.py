"""Random walks over the block allocator beside a model that keeps the three states as plain lists."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dspark.runtime.kv.allocator import BlockAllocator


class AllocatorMachine(RuleBasedStateMachine):
    """No block is lost, handed out twice or in two states; the longest idle block is given up first."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.holders: dict[int, int] = {}
        self.idle: list[int] = []

    @rule()
    def allocate(self) -> None:
        num_blocks = self.allocator.num_blocks
        if len(self.holders) == num_blocks:
            with pytest.raises(IndexError):
                self.allocator.allocate()
            return
        all_idle = len(self.holders) + len(self.idle) == num_blocks
        block, was_idle = self.allocator.allocate()
        assert 0 <= block < num_blocks and block not in self.holders
        assert was_idle == all_idle, "an idle block is given up only when no block is free"
        if was_idle:
            assert block == self.idle.pop(0), "the block that is idle for longest goes first"
        else:
            assert block not in self.idle
        self.holders[block] = 1

    @precondition(lambda self: self.holders or self.idle)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted([*self.holders, *self.idle])))
        self.allocator.retain(block)
        if block in self.idle:
            self.idle.remove(block)
        self.holders[block] = self.holders.get(block, 0) + 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.holders)))
        self.allocator.release(block, keep)
        self.holders[block] -= 1
        if self.holders[block] == 0:
            del self.holders[block]
            if keep:
                self.idle.append(block)

    @rule()
    def blocks_without_a_holder_are_not_released(self) -> None:
        for block in set(range(self.allocator.num_blocks)) - set(self.holders):
            with pytest.raises(ValueError, match="no holder"):
                self.allocator.release(block, True)

    @rule()
    def free_blocks_are_not_shared(self) -> None:
        for block in set(range(self.allocator.num_blocks)) - set(self.holders) - set(self.idle):
            with pytest.raises(ValueError, match="is free"):
                self.allocator.retain(block)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "allocator"):
            return
        allocator = self.allocator
        allocator.check_integrity()
        assert allocator.num_held == len(self.holders)
        assert allocator.num_available == allocator.num_blocks - len(self.holders)
        assert [allocator.ref_count(b) for b in range(allocator.num_blocks)] == [
            self.holders.get(b, 0) for b in range(allocator.num_blocks)
        ]


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=100, stateful_step_count=40, derandomize=True, deadline=None)


def test_memory_that_was_never_needed_is_not_touched() -> None:
    """A freed block is handed out again before a fresh one: the pool is not initialised, and a touched page counts as used memory."""
    allocator = BlockAllocator(100)
    for _ in range(50):
        block, _ = allocator.allocate()
        assert block == 0
        allocator.release(block, keep_content=False)


def test_a_pool_has_at_least_one_block() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockAllocator(0)


def test_integrity_check_sees_a_lost_and_a_doubled_block() -> None:
    """The check is the tests' own instrument: it must not pass on damaged books."""
    lost = BlockAllocator(3)
    lost._free.pop()
    doubled = BlockAllocator(3)
    doubled._free[0] = doubled._free[1]
    in_two_states = BlockAllocator(3)
    in_two_states._idle[in_two_states._free[0]] = None
    for allocator in (lost, doubled, in_two_states):
        with pytest.raises(AssertionError):
            allocator.check_integrity()
