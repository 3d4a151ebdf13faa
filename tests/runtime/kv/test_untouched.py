"""On a CPU a block costs memory from its first use on."""

from dspark.runtime.kv.allocator import BlockAllocator


def touched(spare_untouched: bool) -> int:
    """Highest block ever handed out (and one) when a thousand short sequences pass through a large pool, one after the other."""
    allocator = BlockAllocator(5000, spare_untouched)
    highest = 0
    for _ in range(1000):
        blocks = [allocator.allocate()[0] for _ in range(4)]
        highest = max(highest, *blocks)
        for block in blocks:
            allocator.release(block, keep_content=True)
    allocator.check_integrity()
    return highest + 1


def test_idle_blocks_are_reused_before_untouched_memory() -> None:
    """A cache of all that ever passed through would make the process grow to the pool's size."""
    assert touched(spare_untouched=True) <= BlockAllocator.MIN_IDLE + 8
    assert touched(spare_untouched=False) == 4000


def test_every_block_can_be_had_all_the_same() -> None:
    allocator = BlockAllocator(300, spare_untouched=True)
    for block in [allocator.allocate()[0] for _ in range(200)]:
        allocator.release(block, keep_content=True)
    assert len({allocator.allocate()[0] for _ in range(300)}) == 300
