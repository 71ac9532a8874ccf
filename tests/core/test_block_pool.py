from __future__ import annotations

import pytest

from miniserve.core.block_pool import BlockPool, BlockState
from miniserve.errors import ConfigError


def test_hands_out_every_block_but_block_0() -> None:
    pool = BlockPool(5)
    assert (pool.capacity, pool.num_free, pool.num_used) == (4, 4, 0)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(1) == [4]
    assert (pool.capacity, pool.num_free, pool.num_used) == (4, 0, 4)


def test_takes_the_least_recently_used_and_of_a_sequence_its_tail() -> None:
    pool = BlockPool(7)
    first, second = pool.allocate(3), pool.allocate(2)
    for block_id in [*first, *second]:
        pool.register(block_id, b"content of %d" % block_id)
    pool.free(second)
    pool.free(first)
    assert pool.free_block_ids() == [6, 5, 4, 3, 2, 1]
    assert pool.allocate(4) == [6, 5, 4, 3]


def test_takes_blocks_with_nothing_to_find_before_any_cached_content() -> None:
    """They went to the end of the list: cached prefixes were evicted while empty blocks lay free."""
    pool = BlockPool(6)
    sequence = pool.allocate(4)
    pool.register(1, b"first")
    pool.register(2, b"second")
    pool.free(sequence)
    assert pool.free_block_ids() == [3, 4, 5, 2, 1]
    assert pool.allocate(3) == [3, 4, 5]
    assert (pool.lookup(b"first"), pool.lookup(b"second")) == (1, 2)


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(4)
    [block_id] = pool.allocate(1)
    pool.touch(block_id)
    pool.free([block_id])
    assert not pool.is_free(block_id) and pool.num_free == 2
    pool.free([block_id])
    assert pool.is_free(block_id) and pool.num_free == 3


@pytest.mark.parametrize(("touched", "rest"), [(1, [2, 3]), (2, [1, 3]), (3, [1, 2])])
def test_touching_a_free_block_takes_it_out_of_any_place_of_the_list(touched: int, rest: list[int]) -> None:
    pool = BlockPool(4)
    pool.touch(touched)
    assert pool.free_block_ids() == rest
    assert pool.num_free == 2
    pool.register(touched, b"content")
    pool.free([touched])
    assert pool.allocate(3) == [*rest, touched]
    assert pool.free_block_ids() == []


def test_free_block_keeps_its_hash_until_it_is_taken_for_new_use() -> None:
    pool = BlockPool(3)
    [block_id] = pool.allocate(1)
    pool.register(block_id, b"content")
    pool.free([block_id])
    assert pool.lookup(b"content") == block_id
    assert pool.allocate(1) == [2]
    assert pool.lookup(b"content") == block_id
    assert pool.allocate(1) == [block_id]
    assert pool.lookup(b"content") is None
    assert not pool.is_registered(block_id)


def test_hash_is_dropped_when_a_block_is_taken_again() -> None:
    """A hash that stayed in the map after its block was reused made a later hit read another sequence's KV."""
    pool = BlockPool(2)
    pool.register(pool.allocate(1)[0], b"old")
    pool.free([1])
    pool.register(pool.allocate(1)[0], b"new")
    assert pool.lookup(b"old") is None
    assert pool.lookup(b"new") == 1


def test_twins_keep_the_first_mapping() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.register(first, b"same")
    pool.register(second, b"same")
    assert pool.lookup(b"same") == first
    pool.free([second])
    assert pool.allocate(1) == [second]  # the twin is evicted: the first can still be found
    assert pool.lookup(b"same") == first
    pool.free([first])
    assert pool.allocate(1) == [first]
    assert pool.lookup(b"same") is None


def test_what_is_forgotten_is_found_no_more() -> None:
    pool = BlockPool(6)
    held = pool.allocate(3)
    for block_id, block_hash in zip(held, (b"first", b"second", b"third"), strict=True):
        pool.register(block_id, block_hash)
    pool.forget([1, 2, 4])  # block 4 has no content
    assert [pool.lookup(block_hash) for block_hash in (b"first", b"second", b"third")] == [None, None, 3]
    pool.free(held)
    assert pool.free_block_ids() == [1, 2, 4, 5, 3]  # nothing to find in them: the next to be taken
    pool.register(pool.allocate(1)[0], b"second")
    assert pool.lookup(b"second") == 1
    assert pool.allocate(1) == [2]
    assert pool.lookup(b"second") == 1


def test_forgetting_a_twin_leaves_the_one_that_is_found() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.register(first, b"same")
    pool.register(second, b"same")
    pool.forget([second])
    assert pool.lookup(b"same") == first
    pool.forget([first])
    assert pool.lookup(b"same") is None


def test_a_suspect_block_is_to_be_cleared_once_when_it_is_taken_again() -> None:
    pool = BlockPool(4)
    held = pool.allocate(2)
    pool.register(1, b"content")
    pool.suspect(held)
    pool.free(held)
    pool.touch(1)  # found for what it has: not new
    assert pool.take_blocks_to_clear() == ()
    pool.free([1])
    assert pool.allocate(3) == [2, 3, 1]
    assert pool.take_blocks_to_clear() == (2, 1)
    pool.free([1, 2, 3])
    pool.allocate(3)
    assert pool.take_blocks_to_clear() == ()


def test_snapshot_shows_counts_hashes_and_the_order_of_eviction() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    pool.register(1, b"content")
    pool.touch(2)
    pool.free([1])
    assert pool.snapshot() == [
        BlockState(1, ref_count=0, hash=b"content", free_position=1),
        BlockState(2, ref_count=2, hash=None, free_position=None),
        BlockState(3, ref_count=0, hash=None, free_position=0),
    ]


def test_misuse_is_caught() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="block 1 is free already"):
        pool.free([1])
    with pytest.raises(AssertionError):
        pool.register(1, b"content")


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_a_usable_block_is_refused(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=f"at least 2 blocks.*got {num_blocks}"):
        BlockPool(num_blocks)
