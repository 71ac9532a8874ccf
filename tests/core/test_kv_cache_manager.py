from __future__ import annotations

from collections.abc import Sequence

import pytest

from miniserve.core.kv_cache_manager import KVCacheManager
from miniserve.core.request import Request
from miniserve.errors import ConfigError
from miniserve.sampling_params import SamplingParams


def make_request(token_ids: Sequence[int], salt: bytes = b"") -> Request:
    return Request("r", list(token_ids), SamplingParams(), cache_salt=salt)


def compute(kv: KVCacheManager, request: Request, num_new_tokens: int | None = None) -> list[int]:
    """Admit or continue a request as the scheduler would. Returns the blocks that the prefix cache gave."""
    cached = [] if request.block_ids else kv.find_cached_prefix(request)
    start = request.num_computed_tokens + len(cached) * kv.block_size
    end = request.num_tokens if num_new_tokens is None else start + num_new_tokens
    assert kv.allocate(request, end - start, cached)
    request.num_computed_tokens = end
    kv.cache_computed_blocks(request)
    return cached


def test_blocks_cover_exactly_the_tokens() -> None:
    kv = KVCacheManager(num_blocks=6, block_size=4)
    assert kv.capacity_tokens == 20
    request = make_request(range(10))
    compute(kv, request, 1)
    assert request.block_ids == [1]
    compute(kv, request, 3)
    assert request.block_ids == [1]
    compute(kv, request, 5)
    assert request.block_ids == [1, 2, 3]
    assert kv.usage == pytest.approx(3 / 5)
    kv.free(request)
    assert request.block_ids == [] and kv.usage == 0.0


def test_allocate_is_all_or_nothing() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    request = make_request(range(13))
    assert not kv.allocate(request, 13)
    assert request.block_ids == [] and kv.pool.free_block_ids() == [1, 2, 3]
    assert kv.allocate(request, 12)
    assert request.block_ids == [1, 2, 3]
    assert not kv.allocate(request, 13)


@pytest.mark.parametrize(
    ("num_tokens", "hit"),
    [(1, []), (4, []), (5, [1]), (8, [1]), (9, [1, 2]), (11, [1, 2]), (12, [1, 2]), (13, [1, 2, 3])],
)
def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(num_tokens: int, hit: list[int]) -> None:
    """A prompt found in full left nothing to compute, so no logits: the second answer was empty, or a crash."""
    kv = KVCacheManager(num_blocks=10, block_size=4)
    compute(kv, make_request(range(14)))
    assert kv.find_cached_prefix(make_request(range(num_tokens))) == hit


def test_a_hit_ends_at_the_first_difference() -> None:
    kv = KVCacheManager(num_blocks=10, block_size=4)
    compute(kv, make_request(range(12)))
    assert kv.find_cached_prefix(make_request([0, 1, 2, 3, 99, 5, 6, 7, 8, 9, 10, 11, 12])) == [1]
    assert kv.find_cached_prefix(make_request([99, 1, 2, 3, 4, 5, 6, 7, 8])) == []


def test_salts_do_not_share() -> None:
    kv = KVCacheManager(num_blocks=10, block_size=4)
    compute(kv, make_request(range(9), salt=b"alice"))
    assert kv.find_cached_prefix(make_request(range(9), salt=b"alice")) == [1, 2]
    assert kv.find_cached_prefix(make_request(range(9), salt=b"bob")) == []
    assert kv.find_cached_prefix(make_request(range(9))) == []


def test_only_computed_blocks_can_be_hit() -> None:
    """Of two equal prompts in one step, the second was given blocks that the first had not written yet."""
    kv = KVCacheManager(num_blocks=10, block_size=4)
    first, second = make_request(range(9)), make_request(range(9))
    assert kv.allocate(first, 9)
    assert kv.find_cached_prefix(second) == []
    first.num_computed_tokens = 7
    kv.cache_computed_blocks(first)
    assert kv.find_cached_prefix(second) == [1]


def test_twins_computed_in_one_step_both_stay_correct() -> None:
    kv = KVCacheManager(num_blocks=8, block_size=4)
    first, second = make_request(range(9)), make_request(range(9))
    for request in (first, second):
        assert kv.allocate(request, 9)
    for request in (first, second):
        request.num_computed_tokens = 9
        kv.cache_computed_blocks(request)
    assert (first.block_ids, second.block_ids) == ([1, 2, 3], [4, 5, 6])
    assert kv.find_cached_prefix(make_request(range(9))) == [1, 2]
    kv.free(second)
    assert compute(kv, make_request(range(9))) == [1, 2]


def test_output_tokens_are_found_too() -> None:
    kv = KVCacheManager(num_blocks=10, block_size=4)
    request = make_request(range(6))
    compute(kv, request)
    request.token_ids += [6, 7, 8]
    compute(kv, request)
    kv.free(request)
    assert compute(kv, make_request([*range(8), 50])) == [1, 2]


def test_free_hits_are_not_evicted_by_the_same_call() -> None:
    """Taking room before holding the hits evicted the very blocks that the request was about to read."""
    kv = KVCacheManager(num_blocks=5, block_size=4)
    first = make_request(range(8))
    compute(kv, first)
    other = make_request(range(100, 108))
    compute(kv, other)
    kv.free(first)
    kv.free(other)  # free list, oldest first: 2 1 4 3
    request = make_request([*range(8), *range(50, 57)])
    assert compute(kv, request) == [1, 2]
    assert request.block_ids == [1, 2, 4, 3]


def test_free_hits_do_not_count_as_room() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    first = make_request(range(8))
    compute(kv, first)
    kv.free(first)
    request = make_request([*range(8), *range(50, 55)])  # 2 hits + 2 new blocks, 3 in the pool
    cached = kv.find_cached_prefix(request)
    assert cached == [1, 2]
    assert not kv.allocate(request, 5, cached)
    assert kv.pool.free_block_ids() == [3, 2, 1]
    assert kv.allocate(request, 4, cached)
    assert request.block_ids == [1, 2, 3]


def test_hits_held_by_others_need_no_room() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    compute(kv, make_request(range(8)))
    request = make_request(range(12))
    assert compute(kv, request) == [1, 2]
    assert request.block_ids == [1, 2, 3]
    assert [state.ref_count for state in kv.pool.snapshot()] == [2, 2, 1]


def test_each_block_is_hashed_once() -> None:
    kv = KVCacheManager(num_blocks=10, block_size=4)
    request = make_request(range(9))
    compute(kv, request, 4)
    hashes = list(request.block_hashes)
    compute(kv, request, 4)
    assert len(request.block_hashes) == 2 and request.block_hashes[:1] == hashes
    kv.free(request)
    request.num_computed_tokens = 0
    assert compute(kv, request) == [1, 2]
    assert len(request.block_hashes) == 2


def test_without_prefix_caching_nothing_is_hashed_or_found() -> None:
    kv = KVCacheManager(num_blocks=10, block_size=4, prefix_caching=False)
    request = make_request(range(9))
    assert compute(kv, request) == []
    assert compute(kv, make_request(range(9))) == []
    assert request.block_hashes == []
    assert all(state.hash is None for state in kv.pool.snapshot())
    assert (kv.num_prefix_query_tokens, kv.num_prefix_hit_tokens) == (0, 0)


def test_statistics_count_the_first_admission_only() -> None:
    kv = KVCacheManager(num_blocks=10, block_size=4)
    compute(kv, make_request(range(9)))
    request = make_request(range(10))
    kv.find_cached_prefix(request)  # a look while it waits
    compute(kv, request)
    assert (kv.num_prefix_query_tokens, kv.num_prefix_hit_tokens) == (9 + 10, 8)
    kv.free(request)
    request.num_computed_tokens = 0
    request.num_preemptions = 1
    compute(kv, request)
    assert (kv.num_prefix_query_tokens, kv.num_prefix_hit_tokens) == (9 + 10, 8)


def test_a_request_that_must_not_read_the_cache_asks_nothing_and_fills_it() -> None:
    kv = KVCacheManager(num_blocks=10, block_size=4)
    compute(kv, make_request(range(9)))
    request = Request("r", list(range(9)), SamplingParams(prompt_logprobs=0))
    assert compute(kv, request) == []
    assert request.block_ids == [4, 5, 6]
    assert (kv.num_prefix_query_tokens, kv.num_prefix_hit_tokens) == (9, 0)
    kv.free(request)
    request.num_computed_tokens = 0
    request.token_ids.append(9)
    assert compute(kv, request) == [1, 2]  # it has output: nothing of the prompt is owed any more


@pytest.mark.parametrize("num_computed", range(11))
def test_without_prefix_caching_a_fork_shares_what_its_parent_has_computed(num_computed: int) -> None:
    kv = KVCacheManager(num_blocks=10, block_size=4, prefix_caching=False)
    parent = make_request(range(8))
    fork = Request("f", list(range(8)), SamplingParams(), parent=parent)
    parent.token_ids += [50, 51]
    if num_computed:
        compute(kv, parent, num_computed)
    shared = compute(kv, fork)
    assert shared == parent.block_ids[: min(num_computed // 4, 1)]  # one of its 8 tokens is left to compute
    kv.free(parent)
    assert [state.ref_count for state in kv.pool.snapshot()].count(1) == len(fork.block_ids) == 2
    other = Request("g", list(range(8)), SamplingParams(), parent=parent)
    assert kv.find_cached_prefix(other) == []


def test_forks_do_not_count_in_the_statistics() -> None:
    kv = KVCacheManager(num_blocks=10, block_size=4)
    parent = make_request(range(9))
    compute(kv, parent)
    assert compute(kv, Request("f", list(range(9)), SamplingParams(), parent=parent)) == [1, 2]
    assert (kv.num_prefix_query_tokens, kv.num_prefix_hit_tokens) == (9, 0)


def test_a_request_that_went_wrong_leaves_nothing_to_find() -> None:
    kv = KVCacheManager(num_blocks=10, block_size=4)
    request, sharer = make_request(range(9)), make_request(range(12))
    compute(kv, request)
    assert compute(kv, sharer) == [1, 2]
    kv.forget(request)
    kv.free(request)
    assert kv.find_cached_prefix(make_request(range(13))) == []
    kv.free(sharer)
    assert compute(kv, make_request(range(9))) == []
    assert kv.find_cached_prefix(make_request(range(13))) != []


def test_block_size_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="got 0"):
        KVCacheManager(num_blocks=4, block_size=0)
