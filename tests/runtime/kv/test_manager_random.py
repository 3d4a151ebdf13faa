"""Random walks over the KV manager beside a store that really keeps, for every slot of every block, what was written there."""

from __future__ import annotations

from dataclasses import dataclass, field

from fake_executor import digests
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dspark.runtime.kv.manager import BlockTable, KVCacheManager

# Few beginnings and few tokens, so that most prompts share something and none are told apart by luck.
PROMPTS = st.builds(
    lambda common, tail: common + tail,
    st.sampled_from([[], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9, 5, 6, 7, 8]]),
    st.lists(st.integers(0, 1), min_size=1, max_size=6),
)


@dataclass
class Holder:
    """A sequence as the manager sees it."""

    token_ids: list[int]
    cache_salt: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0
    num_drafted: int = 0
    """Slots past the tokens that were made writable for drafts."""


class ManagerMachine(RuleBasedStateMachine):
    """What a sequence reads through its table is its own beginning, always; a call that fails changes nothing."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.sampled_from([1, 2, 4]), caching=st.sampled_from([True, True, True, False]))
    def start(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.kv = KVCacheManager(num_blocks, block_size, caching)
        self.slots: dict[tuple[int, int], int] = {}
        self.live: list[Holder] = []

    def pick(self, data: st.DataObject) -> Holder:
        return self.live[data.draw(st.integers(0, len(self.live) - 1))]

    def snapshot(self) -> tuple:
        allocator = self.kv.allocator
        counts = [allocator.ref_count(block) for block in range(self.kv.num_blocks)]
        return counts, list(allocator._free), list(allocator._idle), dict(self.kv.index._nodes), [list(h.table.blocks) for h in self.live]

    def store(self, holder: Holder, start: int, stop: int) -> None:
        """Make the copies that are due, then write positions start .. stop - 1, each into a block that nobody else may write."""
        size = self.kv.block_size
        for source, target in self.kv.take_copies():
            for offset in range(size):
                if (source, offset) in self.slots:
                    self.slots[target, offset] = self.slots[source, offset]
                else:
                    self.slots.pop((target, offset), None)
        values = digests(holder.token_ids, holder.cache_salt)
        for position in range(start, stop):
            block = holder.table.blocks[position // size]
            assert self.kv.allocator.ref_count(block) == 1, "a shared block is written"
            self.slots[block, position % size] = values[position]

    @rule(prompt=PROMPTS, salt=st.sampled_from([0, 0, 0, 7]))
    def begin(self, prompt: list[int], salt: int) -> None:
        holder = Holder(list(prompt), salt)
        found, idle = self.kv.num_cached_blocks(holder, len(prompt) - 1)
        available = self.kv.allocator.num_available
        holder.num_computed = self.kv.match_prefix(holder, len(prompt) - 1)
        assert holder.num_computed < len(prompt), "the last token must be computed: its logits are wanted"
        assert len(holder.table.blocks) == found and self.kv.allocator.num_available == available - idle
        self.live.append(holder)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 6))
    def compute(self, data: st.DataObject, count: int) -> None:
        """Some more of the tokens, as a step does: extend, (copies, writes), register."""
        holder = self.pick(data)
        stop = min(holder.num_computed + count, len(holder.token_ids))
        before = self.snapshot()
        if not self.kv.extend(holder, holder.num_computed, stop):
            assert self.snapshot() == before, "a failed extend changed the books"
            assert not self.kv.take_copies()
            return
        holder.num_drafted = 0
        if data.draw(st.booleans()):  # the scheduler registers before the step has written anything
            self.kv.register_full_blocks(holder, stop)
            self.store(holder, holder.num_computed, stop)
        else:
            self.store(holder, holder.num_computed, stop)
            self.kv.register_full_blocks(holder, stop)
        holder.num_computed = stop

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        self.pick(data).token_ids += tokens

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """A sibling shares any number of the tokens computed so far, in blocks full or not."""
        parent = self.pick(data)
        shared = data.draw(st.integers(0, parent.num_computed))
        child = Holder(parent.token_ids[:shared] + data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3)), parent.cache_salt)
        self.kv.fork(parent, child, shared)
        child.num_computed = shared
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 5))
    def draft(self, data: st.DataObject, count: int) -> None:
        """Room for tokens that may be rejected; what is written there must not reach anybody else."""
        holder = self.pick(data)
        if self.kv.extend(holder, holder.num_computed, holder.num_computed + count):
            size = self.kv.block_size
            self.store(holder, 0, 0)
            for position in range(holder.num_computed, holder.num_computed + count):
                block = holder.table.blocks[position // size]
                assert self.kv.allocator.ref_count(block) == 1
                self.slots[block, position % size] = -1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        holder = self.pick(data)
        self.kv.rewind(holder, holder.num_computed)
        assert len(holder.table.blocks) == self.kv.blocks_for(holder.num_computed)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = self.pick(data)
        self.kv.release(holder)
        self.live = [h for h in self.live if h is not holder]

    @invariant()
    def everybody_reads_their_own(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity(self.live)
        size = self.kv.block_size
        for holder in self.live:
            values = digests(holder.token_ids[: holder.num_computed], holder.cache_salt)
            read = [self.slots.get((holder.table.blocks[p // size], p % size)) for p in range(holder.num_computed)]
            assert read == values, "a sequence reads what is not its own"

    @invariant()
    def index_knows_no_free_block_and_grows_no_larger_than_the_pool(self) -> None:
        if not hasattr(self, "kv"):
            return
        index, allocator = self.kv.index, self.kv.allocator
        assert len(index._nodes) == len(index._key_of_block) <= self.kv.num_blocks
        assert {block: key for key, (block, _) in index._nodes.items()} == index._key_of_block
        assert not set(allocator._free) & set(index._key_of_block)
        assert set(allocator._idle) <= set(index._key_of_block)

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for holder in self.live:
                self.kv.release(holder)
            self.kv.check_integrity([])
            assert self.kv.allocator.num_held == 0


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    max_examples=300, stateful_step_count=30, derandomize=True, deadline=None, phases=(Phase.explicit, Phase.generate)
)
