"""What the KV manager promises, one scene at a time. Blocks of 4 tokens unless said otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dspark.runtime.kv.manager import BlockTable, KVCacheManager
from dspark.runtime.kv.prefix_index import ROOT, PrefixIndex


@dataclass
class Holder:
    token_ids: list[int]
    cache_salt: int = 0
    table: BlockTable = field(default_factory=BlockTable)


def computed(kv: KVCacheManager, token_ids: list[int], salt: int = 0) -> Holder:
    """A sequence all of whose tokens are stored and registered."""
    holder = Holder(token_ids, salt)
    start = kv.match_prefix(holder, len(token_ids) - 1)
    assert kv.extend(holder, start, len(token_ids))
    kv.register_full_blocks(holder, len(token_ids))
    return holder


def test_a_prompt_that_is_cached_whole_keeps_its_last_token_to_compute() -> None:
    """Nothing to compute means no logits; and a block that the sequence would have to write must not be shared with it."""
    kv = KVCacheManager(8, 4)
    first = computed(kv, list(range(8)))
    second = Holder(list(range(8)))
    assert kv.match_prefix(second, 7) == 4
    assert second.table.blocks == first.table.blocks[:1]
    longer = Holder(list(range(9)))
    assert kv.match_prefix(longer, 8) == 8


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    """A partly granted request would leave blocks with a sequence that is not going to run."""
    kv = KVCacheManager(4, 4)
    first = computed(kv, list(range(9)))
    second = Holder(list(range(20, 26)))
    assert not kv.extend(second, 0, 6)
    assert second.table.blocks == [] and kv.allocator.num_available == 1 and kv.take_copies() == []
    kv.check_integrity([first, second])
    assert kv.extend(second, 0, 4)


def test_a_forked_block_is_copied_by_whoever_writes_first() -> None:
    """Copy-on-write of the block that is not full; afterwards both own theirs and the full block stays shared."""
    kv = KVCacheManager(8, 4)
    parent = computed(kv, list(range(6)))
    child = Holder([0, 1, 2, 3, 4, 9])
    kv.fork(parent, child, 5)
    old = parent.table.blocks[1]
    assert kv.extend(child, 5, 6)
    new = child.table.blocks[1]
    assert kv.take_copies() == [(old, new)] and kv.take_copies() == []
    assert kv.extend(parent, 6, 7)
    assert kv.take_copies() == [] and parent.table.blocks[1] == old
    assert kv.allocator.ref_count(parent.table.blocks[0]) == 2
    kv.check_integrity([parent, child])


def test_a_block_that_a_fork_writes_into_is_no_longer_found() -> None:
    """The sibling that filled it, and entered it in the index, has ended: its last holder writes other tokens there without a copy."""
    kv = KVCacheManager(8, 4)
    parent, child = computed(kv, [1, 2, 3, 9, 5]), Holder([1, 0, 0])
    kv.fork(parent, child, 1)
    kv.release(parent)
    assert kv.num_cached_blocks(Holder([1, 2, 3, 9, 5]), 4)[0] == 1, "till then it is"
    assert kv.extend(child, 1, 3) and not kv.take_copies()
    assert kv.num_cached_blocks(Holder([1, 2, 3, 9, 5]), 4)[0] == 0
    kv.check_integrity([child])


def test_a_copy_that_finds_no_room_is_refused() -> None:
    """The copy counts as a new block."""
    kv = KVCacheManager(2, 4)
    parent = computed(kv, list(range(6)))
    child = Holder([0, 1, 2, 3, 4, 9])
    kv.fork(parent, child, 5)
    assert not kv.extend(child, 5, 6)
    assert child.table.blocks == parent.table.blocks
    kv.release(child)
    kv.check_integrity([parent])


def test_chains_are_evicted_from_their_ends() -> None:
    """A chain that loses its first block is lost whole, though the others still take room."""
    kv = KVCacheManager(4, 4)
    kv.release(computed(kv, list(range(12))))
    other = computed(kv, list(range(50, 58)))
    again = Holder(list(range(12)))
    assert kv.match_prefix(again, 11) == 8
    kv.check_integrity([other, again])


def test_an_evicted_block_is_no_longer_found() -> None:
    """Its content is overwritten: found again, it would be another prompt's."""
    kv = KVCacheManager(2, 4)
    kv.release(computed(kv, list(range(8))))
    kv.release(computed(kv, list(range(50, 58))))
    assert kv.num_cached_blocks(Holder(list(range(9))), 8) == (0, 0)
    assert kv.num_cached_blocks(Holder(list(range(50, 59))), 8) == (2, 2)


def test_a_rewind_into_a_registered_block_is_refused() -> None:
    """The block would be written anew while the index still names its old tokens; also when the block itself is kept."""
    kv = KVCacheManager(4, 4)
    holder = computed(kv, list(range(8)))
    for num_tokens in (7, 4, 3):
        with pytest.raises(AssertionError):
            kv.rewind(holder, num_tokens)
    assert kv.extend(holder, 8, 11)
    kv.rewind(holder, 8)
    assert len(holder.table.blocks) == 2


def test_a_block_that_is_registered_anew_leaves_no_old_entry() -> None:
    """Two sequences compute the same beginning side by side, the registered one is evicted, the other is forked: its blocks get new
    keys. The old entries stayed for ever, a leak over millions of lines."""
    kv = KVCacheManager(5, 4)
    first, second = Holder(list(range(4))), Holder(list(range(12)))
    assert kv.extend(first, 0, 4) and kv.extend(second, 0, 12)
    kv.register_full_blocks(first, 4)
    kv.register_full_blocks(second, 12)
    kv.release(first)
    filler = computed(kv, list(range(90, 98)))
    assert kv.num_cached_blocks(second, 12) == (0, 0), "the beginning is evicted"
    kv.release(filler)
    child = Holder(list(range(10)))
    kv.fork(second, child, 9)
    assert kv.extend(child, 9, 10)
    kv.register_full_blocks(child, 10)
    assert kv.num_cached_blocks(second, 12)[0] == 2
    assert len(kv.index._nodes) == len(kv.index._key_of_block)


def test_salts_keep_chains_apart() -> None:
    """Keys that were rotated for another prompt length are wrong ones although the tokens are equal."""
    kv = KVCacheManager(9, 4)
    holders = [computed(kv, list(range(9)), salt) for salt in (0, 5, 6)]
    assert len({block for holder in holders for block in holder.table.blocks[:1]}) == 3
    for salt, holder in zip((0, 5, 6), holders):
        again = Holder(list(range(9)), salt)
        assert kv.match_prefix(again, 8) == 8
        assert again.table.blocks == holder.table.blocks[:2]


def test_prompts_one_token_apart_share_exactly_what_is_equal() -> None:
    """B37: a key that left out a token, or compared only the last hash, gave a prompt its neighbour's keys and values."""
    base = [10 + (7 * i * i + 3 * i) % 50 for i in range(48)]
    prompts = [base]
    for position in (0, 1, 14, 15, 16, 17, 30, 31, 32, 33, 46, 47, 8, 24):
        prompts.append([*base[:position], 1, *base[position + 1 :]])
    assert len(prompts) == 15
    for order in (prompts, prompts[::-1]):
        kv = KVCacheManager(100, 16)
        owners: dict[int, tuple[int, ...]] = {}
        for prompt in order:
            holder = Holder(prompt)
            shared = kv.match_prefix(holder, len(prompt) - 1) // 16
            known = {tokens[: 16 * n] for tokens in set(owners.values()) for n in (1, 2, 3)}
            assert shared == sum(tuple(prompt[: 16 * n]) in known for n in (1, 2))
            for i, block in enumerate(holder.table.blocks):
                assert owners[block] == tuple(prompt[: 16 * (i + 1)])
            assert kv.extend(holder, 16 * shared, 48)
            kv.register_full_blocks(holder, 48)
            for i in range(shared, 3):
                owners[holder.table.blocks[i]] = tuple(prompt[: 16 * (i + 1)])


def test_equal_blocks_after_different_beginnings_are_different() -> None:
    """The key of a block is its whole chain: its own tokens alone say nothing about what its keys have seen."""
    index = PrefixIndex(2)
    after_one = index.register(index.register(ROOT, [1, 1, 7, 7], 0, 0), [1, 1, 7, 7], 2, 1)
    after_two = index.register(index.register(ROOT, [2, 2, 7, 7], 0, 2), [2, 2, 7, 7], 2, 3)
    assert after_one != after_two
    assert index.match([2, 2, 7, 7], ROOT, 4) == ([2, 3], after_two)
    assert index.match([7, 7, 7, 7], ROOT, 4) == ([], ROOT)
    index.forget(0)
    assert index.match([1, 1, 7, 7], ROOT, 4) == ([], ROOT)
    index.register(ROOT, [1, 1], 0, 4)
    assert index.match([1, 1, 7, 7], ROOT, 4)[0] == [4], "what hung under an evicted block must not come back with its successor"


def test_token_ids_of_any_vocabulary_make_distinct_keys() -> None:
    """Keys of too few bytes for a token would fold large vocabularies together."""
    index = PrefixIndex(1)
    for block, token in enumerate([0, 1, 255, 256, 65535, 65536, 262143, 2**31 - 1]):
        index.register(ROOT, [token], 0, block)
    assert len(index) == 8
