"""Beginnings that end inside a block: the common part is copied, never shared, and never from a block that is not written yet."""

from dspark.runtime.kv.manager import BlockTable, KVCacheManager


class Holder:
    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.table = BlockTable()
        self.cache_salt = 0


def finished(kv: KVCacheManager, token_ids: list[int]) -> Holder:
    """A sequence that was computed in a step of its own."""
    seq = Holder(token_ids)
    kv.extend(seq, kv.match_prefix(seq, len(token_ids) - 1), len(token_ids))
    kv.register_full_blocks(seq, len(token_ids))
    kv.take_copies()
    return seq


def test_common_part_of_a_block_is_copied() -> None:
    kv = KVCacheManager(20, 16)
    first = finished(kv, [*range(24), *range(100, 120)])
    second = Holder([*range(24), *range(200, 220)])
    assert kv.match_prefix(second, 43) == 24
    assert kv.take_copies() == [(first.table.blocks[1], second.table.blocks[1])]
    assert second.table.blocks[0] == first.table.blocks[0]
    assert second.table.blocks[1] not in first.table.blocks
    kv.check_integrity([first, second])


def test_the_likest_block_is_taken() -> None:
    kv = KVCacheManager(20, 16)
    finished(kv, [*range(6), *range(50, 70)])
    likest = finished(kv, [*range(11), *range(60, 80)])
    seq = Holder([*range(11), *range(90, 99)])
    assert kv.match_prefix(seq, 19) == 11
    assert kv.take_copies()[0][0] == likest.table.blocks[0]


def test_a_block_of_the_same_step_is_not_copied() -> None:
    """The copies of a step are made before its writes: such a copy would hold what was there before."""
    kv = KVCacheManager(20, 16)
    first = Holder(list(range(20)))
    kv.extend(first, kv.match_prefix(first, 19), 20)
    kv.register_full_blocks(first, 20)
    second = Holder([*range(10), *range(90, 99)])
    assert kv.match_prefix(second, 18) == 0
    assert kv.take_copies() == []
    third = Holder([*range(10), *range(80, 89)])
    assert kv.match_prefix(third, 18) == 10


def test_the_last_token_is_left_to_compute() -> None:
    kv = KVCacheManager(20, 16)
    finished(kv, list(range(40)))
    seq = Holder(list(range(24)))
    assert kv.match_prefix(seq, 23) == 23


def test_few_tokens_are_computed_rather_than_copied() -> None:
    kv = KVCacheManager(20, 16)
    finished(kv, list(range(40)))
    assert kv.match_prefix(Holder([0, 1, 2, *range(90, 110)]), 22) == 0


def test_a_full_pool_copies_nothing() -> None:
    kv = KVCacheManager(3, 16)
    finished(kv, list(range(33)))
    assert kv.match_prefix(Holder([*range(10), *range(90, 99)]), 18) == 0
