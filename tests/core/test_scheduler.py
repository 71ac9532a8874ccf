"""The policy of the scheduler, step by step, with exact block ids. A fake runner samples what the test says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from miniserve.core.kv_cache_manager import KVCacheManager
from miniserve.core.request import Request, RequestStatus
from miniserve.core.schedule import RunnerOutput, RunnerResult, SchedulerOutput
from miniserve.core.scheduler import RequestNews, Scheduler
from miniserve.errors import ConfigError, ContextLengthError, InvalidParameterError
from miniserve.outputs import FinishReason, TokenLogprobs
from miniserve.sampling_params import SamplingParams

EOS = 0
OTHER = 999  # what the fake runner samples unless told otherwise


def make_scheduler(
    num_blocks: int = 100,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 1000,
    prefix_caching: bool = True,
) -> Scheduler:
    return Scheduler(
        KVCacheManager(num_blocks, block_size=4, prefix_caching=prefix_caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )


def make_request(request_id: str, token_ids: Sequence[int], **sampling: Any) -> Request:
    sampling.setdefault("max_tokens", None)
    return Request(request_id, list(token_ids), SamplingParams(**sampling), eos_token_ids=frozenset({EOS}))


def make_choices(n: int, token_ids: Sequence[int], **sampling: Any) -> list[Request]:
    """n choices of one prompt: "p" and its forks "p-1", "p-2", ..."""
    return [make_request("p" if index == 0 else f"p-{index}", token_ids, **sampling) for index in range(n)]


def complete(scheduler: Scheduler, output: SchedulerOutput, sampled: Sequence[int] = (OTHER,)) -> list[Any]:
    results = tuple(RunnerResult(tuple(sampled) if item.samples else ()) for item in output.scheduled)
    return [(news.request.request_id, news.token_ids) for news in scheduler.update(output, RunnerOutput(results))]


def step(scheduler: Scheduler, sampled: Sequence[int] = (OTHER,)) -> SchedulerOutput:
    output = scheduler.schedule()
    complete(scheduler, output, sampled)
    return output


def spans(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(item.request_id, item.start, item.end) for item in output.scheduled]


# --- prefill, decode, budget ---


def test_prefill_then_decode() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1, 2, 3, 4, 5], max_tokens=3)
    scheduler.add(request)
    assert scheduler.has_work and scheduler.num_waiting == 1
    output = scheduler.schedule()
    [item] = output.scheduled
    assert (item.start, item.end, item.samples, item.num_prompt_tokens) == (0, 5, True, 5)
    assert item.block_ids == [1, 2] and item.token_ids == [1, 2, 3, 4, 5]
    assert complete(scheduler, output, [10]) == [("a", (10,))]
    assert spans(step(scheduler, [11])) == [("a", 5, 6)]
    assert spans(step(scheduler, [12])) == [("a", 6, 7)]
    assert request.token_ids == [1, 2, 3, 4, 5, 10, 11, 12]
    assert request.finish_reason is FinishReason.LENGTH and request.block_ids == []
    assert not scheduler.has_work and scheduler.kv.pool.num_used == 0


def test_a_prompt_longer_than_the_budget_is_chunked() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=7)
    scheduler.add(make_request("a", range(1, 17)))
    outputs = [step(scheduler) for _ in range(4)]
    assert [spans(output) for output in outputs] == [
        [("a", 0, 7)],
        [("a", 7, 14)],
        [("a", 14, 16)],
        [("a", 16, 17)],
    ]
    assert [output.scheduled[0].samples for output in outputs] == [False, False, True, True]


def test_running_requests_come_before_waiting_ones() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", range(1, 5)))
    step(scheduler)
    scheduler.add(make_request("b", range(11, 26)))
    scheduler.add(make_request("c", range(31, 33)))
    assert spans(step(scheduler)) == [("a", 4, 5), ("b", 0, 7)]
    assert spans(step(scheduler)) == [("a", 5, 6), ("b", 7, 14)]
    assert spans(step(scheduler)) == [("a", 6, 7), ("b", 14, 15), ("c", 0, 2)]


def test_max_num_seqs_holds_back_the_queue() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id in "abc":
        scheduler.add(make_request(request_id, [1, 2], max_tokens=1))
    assert spans(step(scheduler)) == [("a", 0, 2), ("b", 0, 2)]
    assert scheduler.num_waiting == 1
    assert spans(step(scheduler)) == [("c", 0, 2)]


def test_nobody_overtakes_a_request_that_does_not_fit() -> None:
    scheduler = make_scheduler(num_blocks=5)
    scheduler.add(make_request("a", range(1, 9), max_tokens=2))
    step(scheduler)
    scheduler.add(make_request("big", range(11, 23)))
    scheduler.add(make_request("small", [31]))
    assert spans(step(scheduler)) == [("a", 8, 9)]  # 2 blocks would do for "small"
    assert spans(step(scheduler)) == [("big", 0, 12), ("small", 0, 1)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 8, 64])
@pytest.mark.parametrize("prompt_len", range(1, 14))
def test_every_prompt_length_and_chunk_size(prompt_len: int, chunk: int) -> None:
    """A last chunk that ended on a block border tripped the block manager elsewhere: borders of all kinds."""
    scheduler = make_scheduler(max_num_batched_tokens=chunk)
    for request_id in ("first", "again"):
        request = make_request(request_id, range(1, prompt_len + 1), max_tokens=6)
        scheduler.add(request)
        while scheduler.has_work:
            for item in step(scheduler).scheduled:
                assert len(item.block_ids) == -(-item.end // 4) or request.block_ids == []
        assert request.num_output_tokens == 6
        assert request.num_cached_tokens == (0 if request_id == "first" else (prompt_len - 1) // 4 * 4)
    assert scheduler.kv.pool.num_used == 0


# --- the end of a request ---


@pytest.mark.parametrize(
    ("sampling", "sampled", "reason", "stop_reason"),
    [
        ({}, EOS, FinishReason.STOP, None),
        ({"ignore_eos": True}, EOS, None, None),
        ({"stop_token_ids": (8, 9)}, 9, FinishReason.STOP, 9),
        ({"stop_token_ids": (8, 9)}, 7, None, None),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, EOS, FinishReason.STOP, EOS),
        ({"max_tokens": 1}, 7, FinishReason.LENGTH, None),
        ({"max_tokens": 1}, EOS, FinishReason.STOP, None),
    ],
)
def test_what_ends_a_request(
    sampling: dict[str, Any], sampled: int, reason: FinishReason | None, stop_reason: int | None
) -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1, 2], **sampling)
    scheduler.add(request)
    step(scheduler, [sampled])
    assert request.token_ids == [1, 2, sampled]
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
    assert scheduler.has_work == (reason is None)


def test_every_eos_id_ends_a_request_and_ignore_eos_ignores_them_all() -> None:
    """A model with two end tokens ran on after the second one, or was stopped by it in spite of ignore_eos."""
    for eos in (5, 6):
        for ignore_eos in (False, True):
            scheduler = make_scheduler()
            sampling = SamplingParams(ignore_eos=ignore_eos)
            request = Request("a", [1], sampling, eos_token_ids=frozenset({5, 6}))
            scheduler.add(request)
            step(scheduler, [eos])
            assert (request.status is RequestStatus.FINISHED) == (not ignore_eos)


@pytest.mark.parametrize(("max_model_len", "num_blocks", "total"), [(10, 100, 10), (1000, 4, 12)])
def test_output_ends_with_the_context_or_the_cache(max_model_len: int, num_blocks: int, total: int) -> None:
    """A request that outgrows the pool must end: it would preempt itself for ever, with the server in health."""
    scheduler = make_scheduler(num_blocks, max_model_len=max_model_len)
    request = make_request("a", [1, 2, 3])
    scheduler.add(request)
    for _ in range(total - 3):
        assert scheduler.has_work
        step(scheduler)
    assert request.finish_reason is FinishReason.LENGTH and request.num_tokens == total


def test_tokens_after_the_one_that_ends_a_request_are_dropped() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1, 2])
    scheduler.add(request)
    output = scheduler.schedule()
    assert complete(scheduler, output, [7, EOS, 8]) == [("a", (7, EOS))]
    assert request.token_ids == [1, 2, 7, EOS]


def test_several_tokens_of_a_step_are_all_computed_later() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2]))
    step(scheduler, [7, 8, 9])
    assert spans(step(scheduler)) == [("a", 2, 5)]


def test_finish_from_outside_frees_the_blocks() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1, 2, 3])
    scheduler.add(request)
    step(scheduler)
    scheduler.finish(request, FinishReason.STOP, "END")
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, FinishReason.STOP)
    assert request.stop_reason == "END" and request.block_ids == []
    assert not scheduler.has_work and scheduler.kv.pool.num_used == 0


def test_a_stop_string_in_the_last_allowed_token_is_a_stop() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1, 2, 3], max_tokens=1)
    scheduler.add(request)
    step(scheduler)
    assert request.finish_reason is FinishReason.LENGTH
    scheduler.finish(request, FinishReason.STOP, "END")
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "END")


# --- admission ---


def test_prompt_and_one_token_must_fit_the_cache() -> None:
    """A prompt larger than the whole cache waited for ever, and everybody behind it too, with the server in health."""
    scheduler = make_scheduler(num_blocks=4)
    with pytest.raises(ContextLengthError, match=r"12 tokens.*KV cache holds 12 tokens") as error:
        scheduler.add(make_request("big", range(1, 13)))
    assert error.value.param == "prompt"
    assert not scheduler.has_work
    fits = make_request("fits", range(1, 12))
    scheduler.add(fits)
    step(scheduler)
    assert fits.finish_reason is FinishReason.LENGTH and fits.num_output_tokens == 1


def test_prompt_and_one_token_must_fit_the_context() -> None:
    scheduler = make_scheduler(max_model_len=8)
    with pytest.raises(ContextLengthError, match=r"8 tokens.*max_model_len\) holds 8 tokens"):
        scheduler.add(make_request("big", range(1, 9)))
    fits = make_request("fits", range(1, 8))
    scheduler.add(fits)
    step(scheduler)
    assert fits.num_output_tokens == 1


def test_empty_prompt_is_refused() -> None:
    """An empty prompt has no token to compute: it killed the engine, or was never answered."""
    scheduler = make_scheduler()
    with pytest.raises(InvalidParameterError, match="no tokens"):
        scheduler.add(make_request("a", []))
    scheduler.add(make_request("b", [1]))
    assert spans(step(scheduler)) == [("b", 0, 1)]


def test_an_id_may_be_used_again_only_after_its_end() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1], max_tokens=1))
    with pytest.raises(InvalidParameterError, match="'a' is in use"):
        scheduler.add(make_request("a", [2]))
    step(scheduler)
    scheduler.add(make_request("a", [2]))
    assert spans(step(scheduler)) == [("a", 0, 1)]


@pytest.mark.parametrize("limit", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_a_limit_of_zero_is_refused(limit: str) -> None:
    limits: dict[str, int] = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 8, limit: 0}
    with pytest.raises(ConfigError, match=f"{limit} must be at least 1, got 0"):
        Scheduler(KVCacheManager(8, 4), **limits)


# --- preemption ---


def test_preemption_takes_the_newest_and_puts_it_in_front() -> None:
    scheduler = make_scheduler(num_blocks=5, max_num_seqs=2, prefix_caching=False)
    first, second = (
        make_request("a", range(1, 8), max_tokens=6),
        make_request("b", range(11, 19), max_tokens=2),
    )
    for request in (first, second, make_request("c", [31])):
        scheduler.add(request)
    step(scheduler)
    assert (first.block_ids, second.block_ids) == ([1, 2], [3, 4])
    output = step(scheduler)  # "b" needs a third block, and is itself the newest
    assert (spans(output), output.preempted_ids) == ([("a", 7, 8)], ("b",))
    assert (second.status, second.num_computed_tokens, second.block_ids) == (RequestStatus.WAITING, 0, [])
    assert (second.num_preemptions, scheduler.num_preemptions) == (1, 1)
    output = step(scheduler)  # "a" takes a third block: "b" does not fit beside it, "c" must not overtake
    assert (spans(output), first.block_ids) == ([("a", 8, 9)], [1, 2, 3])
    for _ in range(3):
        assert [item.request_id for item in step(scheduler).scheduled] == ["a"]
    assert first.finish_reason is FinishReason.LENGTH
    assert spans(step(scheduler)) == [("b", 0, 9), ("c", 0, 1)]
    assert second.finish_reason is FinishReason.LENGTH
    assert second.token_ids == [*range(11, 19), OTHER, OTHER]


def test_the_oldest_may_preempt_several_and_their_order_is_kept() -> None:
    scheduler = make_scheduler(num_blocks=4, prefix_caching=False)
    for request_id, num_tokens in (("a", 4), ("b", 1), ("c", 1)):
        scheduler.add(make_request(request_id, range(1, num_tokens + 1)))
    step(scheduler, [OTHER] * 5)
    output = step(scheduler)  # "a" goes from one block to all three
    assert (spans(output), output.preempted_ids) == ([("a", 4, 9)], ("c", "b"))
    for oldest in "abc":
        assert step(scheduler).scheduled[0].request_id == oldest
        scheduler.abort(oldest)


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=8, prefix_caching=False)
    for request in (
        make_request("a", range(1, 9)),
        make_request("b", range(11, 21)),
        make_request("c", [31]),
    ):
        scheduler.add(request)
    assert spans(step(scheduler)) == [("a", 0, 8)]
    assert spans(step(scheduler)) == [("a", 8, 9), ("b", 0, 7)]
    output = step(scheduler)  # "b" lacks a block for the rest of its prompt; its first chunk would fit again
    assert (spans(output), output.preempted_ids) == ([("a", 9, 10)], ("b",))
    assert scheduler.num_waiting == 2
    assert spans(step(scheduler)) == [("a", 10, 11), ("b", 0, 7)]


def test_a_resumed_request_keeps_its_split_and_its_first_count_of_cached_tokens() -> None:
    """After a preemption, generated tokens passed for prompt: penalties, usage and max_tokens were all wrong."""
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add(make_request("a", range(1, 8), max_tokens=10))
    second = make_request("b", range(11, 18), max_tokens=6)
    scheduler.add(second)
    for _ in range(4):
        step(scheduler)
    assert second.num_preemptions == 1 and second.num_output_tokens > 0
    while scheduler.has_work:
        for item in step(scheduler).scheduled:
            if item.request_id == "b":
                assert item.num_prompt_tokens == 7
    assert second.num_preemptions == 1
    assert (second.num_prompt_tokens, second.num_output_tokens, second.num_cached_tokens) == (7, 6, 0)
    assert scheduler.kv.num_prefix_query_tokens == 14


def test_a_resumed_request_hits_what_is_left_of_its_own_blocks() -> None:
    scheduler = make_scheduler(num_blocks=7)
    scheduler.add(make_request("a", range(1, 8), max_tokens=3))
    second = make_request("b", range(11, 27), max_tokens=6)
    scheduler.add(second)
    step(scheduler)
    assert second.block_ids == [3, 4, 5, 6]
    output = step(scheduler)  # "b" needs a fifth block
    assert output.preempted_ids == ("b",)
    output = step(scheduler)  # "a" takes block 6, the tail of "b"
    assert spans(output) == [("a", 8, 9)]
    [item] = step(scheduler).scheduled  # "a" is done: blocks 3 4 5 are hits, 16 tokens minus 12 to compute
    assert (item.request_id, item.start, item.end) == ("b", 12, 17)
    assert item.block_ids[:3] == [3, 4, 5]
    assert (second.num_cached_tokens, second.num_preemptions) == (0, 1)


# --- prefix cache ---


def test_the_same_prompt_twice_leaves_a_token_to_compute() -> None:
    """A prompt whose every block was found left nothing to compute: the second answer was empty."""
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(1, 9), max_tokens=1))
    step(scheduler)
    again = make_request("b", range(1, 9), max_tokens=1)
    scheduler.add(again)
    assert spans(step(scheduler)) == [("b", 4, 8)]
    assert again.num_cached_tokens == 4 and again.token_ids[-1] == OTHER


def test_equal_prompts_of_one_step_do_not_share_unwritten_blocks() -> None:
    scheduler = make_scheduler()
    first, second = make_request("a", range(1, 10)), make_request("b", range(1, 10))
    scheduler.add(first)
    scheduler.add(second)
    assert spans(step(scheduler)) == [("a", 0, 9), ("b", 0, 9)]
    assert (first.block_ids, second.block_ids) == ([1, 2, 3], [4, 5, 6])
    third = make_request("c", range(1, 10))
    scheduler.add(third)
    assert spans(step(scheduler))[-1] == ("c", 8, 9)
    assert third.block_ids[:2] == [1, 2]


def test_an_aborted_prefill_is_found_when_it_is_sent_again() -> None:
    """After a client had stopped a long prompt and sent it again, everything was computed again."""
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add(make_request("a", range(1, 31)))
    step(scheduler)
    scheduler.abort("a")
    again = make_request("b", range(1, 31))
    scheduler.add(again)
    assert spans(step(scheduler)) == [("b", 8, 18)]
    assert again.num_cached_tokens == 8 and again.block_ids[:2] == [1, 2]


def test_the_next_turn_finds_the_answer_of_the_last_one() -> None:
    scheduler = make_scheduler()
    request = make_request("a", [1, 2, 3], max_tokens=6)
    scheduler.add(request)
    while scheduler.has_work:
        step(scheduler)
    scheduler.add(make_request("b", [*request.token_ids, 50, 51]))
    assert spans(step(scheduler)) == [("b", 8, 11)]


# --- abort ---


def test_abort_in_every_phase() -> None:
    scheduler = make_scheduler(num_blocks=5, max_num_batched_tokens=12, max_num_seqs=2, prefix_caching=False)
    requests = {
        "a": make_request("a", range(1, 8)),
        "b": make_request("b", range(11, 19)),
        "c": make_request("c", [31, 32]),
    }
    for request in requests.values():
        scheduler.add(request)
    assert spans(step(scheduler)) == [("a", 0, 7), ("b", 0, 5)]
    step(scheduler)
    output = step(scheduler)
    assert output.preempted_ids == ("b",)
    for request_id in ("b", "c", "a"):  # preempted, waiting, running
        assert scheduler.abort(request_id) is requests[request_id]
        assert requests[request_id].finish_reason is FinishReason.ABORT
        assert scheduler.abort(request_id) is None
    assert not scheduler.has_work
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.kv.pool.num_used) == (0, 0, 0)


def test_abort_between_schedule_and_update() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(1, 6)))
    scheduler.add(make_request("b", range(11, 16)))
    output = scheduler.schedule()
    scheduler.abort("a")
    assert output.scheduled[0].block_ids == [1, 2]  # the step on its way stays whole
    assert complete(scheduler, output) == [("b", (OTHER,))]
    assert spans(step(scheduler)) == [("b", 5, 6)]
    again = make_request("again", range(1, 6))
    scheduler.add(again)
    step(scheduler)
    assert again.num_cached_tokens == 0  # what the aborted step wrote was never registered


def test_an_id_that_came_back_between_schedule_and_update_gets_no_token_of_the_old_request() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(1, 6)))
    output = scheduler.schedule()
    scheduler.abort("a")
    new = make_request("a", [1, 2])
    scheduler.add(new)
    assert complete(scheduler, output) == []
    assert (new.token_ids, new.num_computed_tokens) == ([1, 2], 0)


def test_abort_of_an_unknown_id() -> None:
    assert make_scheduler().abort("nobody") is None


# --- forks: several choices of one prompt ---


def test_a_prompt_with_forks_is_computed_once() -> None:
    scheduler = make_scheduler()
    parent, *forks = choices = make_choices(3, range(1, 11), max_tokens=3)
    scheduler.add(parent, forks)
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.has_work) == (3, 0, True)
    assert [choice.is_fork for choice in choices] == [False, True, True]
    assert spans(step(scheduler)) == [("p", 0, 10)]
    assert (scheduler.num_waiting, scheduler.num_running) == (2, 1)
    assert spans(step(scheduler)) == [("p", 10, 11), ("p-1", 8, 10), ("p-2", 8, 10)]
    assert [choice.block_ids for choice in choices] == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert [choice.num_cached_tokens for choice in choices] == [0, 8, 8]
    assert (scheduler.kv.num_prefix_query_tokens, scheduler.kv.num_prefix_hit_tokens) == (10, 0)
    while scheduler.has_work:
        step(scheduler)
    assert [choice.finish_reason for choice in choices] == [FinishReason.LENGTH] * 3
    assert scheduler.kv.pool.num_used == 0


def test_forks_share_their_parents_blocks_without_a_prefix_cache() -> None:
    scheduler = make_scheduler(prefix_caching=False)
    parent, *forks = choices = make_choices(3, range(1, 11), max_tokens=3)
    scheduler.add(parent, forks)
    step(scheduler)
    assert spans(step(scheduler)) == [("p", 10, 11), ("p-1", 8, 10), ("p-2", 8, 10)]
    assert [choice.block_ids for choice in choices] == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert [state.ref_count for state in scheduler.kv.pool.snapshot()[:5]] == [3, 3, 1, 1, 1]
    assert all(state.hash is None for state in scheduler.kv.pool.snapshot())
    for choice in choices:
        scheduler.abort(choice.request_id)
    assert scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize(("prompt_len", "shared"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_fork_shares_whole_blocks_and_has_a_token_left_to_compute(
    prompt_len: int, shared: int, prefix_caching: bool
) -> None:
    scheduler = make_scheduler(prefix_caching=prefix_caching)
    parent, fork = make_choices(2, range(1, prompt_len + 1))
    scheduler.add(parent, [fork])
    step(scheduler)
    assert spans(step(scheduler)) == [("p", prompt_len, prompt_len + 1), ("p-1", shared, prompt_len)]
    assert fork.block_ids[: shared // 4] == parent.block_ids[: shared // 4]
    assert len(set(fork.block_ids[shared // 4 :]) & set(parent.block_ids)) == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_forks_wait_for_the_whole_prompt_and_then_go_to_the_front(prefix_caching: bool) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=4, prefix_caching=prefix_caching)
    parent, *forks = make_choices(3, range(1, 15))
    scheduler.add(parent, forks)
    scheduler.add(make_request("next", range(31, 42)))
    assert spans(step(scheduler)) == [("p", 0, 8)]
    assert spans(step(scheduler)) == [("p", 8, 14), ("next", 0, 2)]
    assert spans(step(scheduler)) == [("p", 14, 15), ("next", 2, 9)]
    assert spans(step(scheduler)) == [("p", 15, 16), ("next", 9, 11), ("p-1", 12, 14), ("p-2", 12, 14)]
    assert scheduler.num_waiting == 0


def test_forks_of_two_parents_keep_the_order_of_the_parents() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    for prefix, first_token in (("a", 1), ("b", 21)):
        prompt = range(first_token, first_token + 6)
        scheduler.add(make_request(prefix, prompt, max_tokens=1), [make_request(f"{prefix}{i}", prompt) for i in "12"])
    scheduler.add(make_request("c", [41]))
    assert spans(step(scheduler)) == [("a", 0, 6), ("b", 0, 6), ("c", 0, 1)]
    assert spans(step(scheduler)) == [("c", 1, 2), ("a1", 4, 6), ("a2", 4, 6)]
    scheduler.abort("a1")
    assert spans(step(scheduler)) == [("c", 2, 3), ("a2", 6, 7), ("b1", 4, 6)]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_parent_that_ends_with_its_first_token(prefix_caching: bool) -> None:
    """Its blocks are free by the time its forks come: the prefix cache still has them, else they are computed anew."""
    scheduler = make_scheduler(prefix_caching=prefix_caching)
    parent, *forks = make_choices(3, range(1, 11), max_tokens=1)
    scheduler.add(parent, forks)
    step(scheduler, [EOS])
    assert parent.finish_reason is FinishReason.STOP
    start = 8 if prefix_caching else 0
    assert spans(step(scheduler)) == [("p-1", start, 10), ("p-2", start, 10)]
    assert not scheduler.has_work


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_parent_aborted_in_the_middle_of_its_prompt(prefix_caching: bool) -> None:
    """Its forks go on without it, with what it has computed where that can be found; never with what it has not."""
    scheduler = make_scheduler(max_num_batched_tokens=9, prefix_caching=prefix_caching)
    parent, *forks = make_choices(3, range(1, 15))
    scheduler.add(parent, forks)
    scheduler.add(make_request("next", [31]))
    step(scheduler)
    on_its_way = scheduler.schedule()
    scheduler.abort("p")
    assert complete(scheduler, on_its_way) == [("next", (OTHER,))]
    assert scheduler.num_waiting == 2
    start = 8 if prefix_caching else 0
    assert spans(scheduler.schedule())[:2] == [("next", 1, 2), ("p-1", start, min(14, start + 8))]
    assert forks[0].num_cached_tokens == start


def test_forks_of_a_parent_aborted_in_the_queue_take_its_place() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("first", [1, 2]))
    parent, *forks = make_choices(3, [11, 12], max_tokens=1)
    scheduler.add(parent, forks)
    scheduler.add(make_request("last", [21, 22], max_tokens=1))
    scheduler.abort("p")
    assert scheduler.num_waiting == 4
    scheduler.abort("first")
    assert [step(scheduler).scheduled[0].request_id for _ in range(3)] == ["p-1", "p-2", "last"]


def test_fork_aborted_while_it_waits_for_its_parent() -> None:
    scheduler = make_scheduler()
    parent, *forks = make_choices(3, range(1, 11))
    scheduler.add(parent, forks)
    assert scheduler.abort("p-1") is forks[0]
    assert forks[0].finish_reason is FinishReason.ABORT and scheduler.num_waiting == 2
    output = scheduler.schedule()
    assert scheduler.abort("p-2") is forks[1]
    complete(scheduler, output)
    assert spans(step(scheduler)) == [("p", 10, 11)]
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)
    scheduler.abort("p")
    assert not scheduler.has_work and scheduler.kv.pool.num_used == 0


def test_all_choices_aborted_while_they_wait() -> None:
    for order in (["p", "p-1", "p-2"], ["p-2", "p-1", "p"], ["p-1", "p", "p-2"]):
        scheduler = make_scheduler()
        parent, *forks = make_choices(3, [1, 2])
        scheduler.add(parent, forks)
        for request_id in order:
            assert scheduler.abort(request_id) is not None
        assert not scheduler.has_work and scheduler.num_waiting == 0
        assert scheduler.schedule().scheduled == ()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_fork_is_preempted_before_its_parent(prefix_caching: bool) -> None:
    scheduler = make_scheduler(num_blocks=5, prefix_caching=prefix_caching)
    parent, fork = make_choices(2, range(1, 8), max_tokens=7)
    scheduler.add(parent, [fork])
    for _ in range(3):
        step(scheduler)
    assert (parent.block_ids, fork.block_ids) == ([1, 2, 4], [1, 3])
    output = step(scheduler)  # the fork needs a third block
    assert (spans(output), output.preempted_ids) == ([("p", 9, 10)], ("p-1",))
    assert [state.ref_count for state in scheduler.kv.pool.snapshot()] == [1, 1, 0, 1]
    output = step(scheduler)
    if prefix_caching:  # what the parent said after the prompt is found, too, as the fork said the same
        assert spans(output) == [("p", 10, 11), ("p-1", 8, 9)] and fork.block_ids == [1, 2, 3]
    else:  # block 1 is the parent's still, but two more are needed
        assert spans(output) == [("p", 10, 11)]
    while scheduler.has_work:
        step(scheduler)
    assert parent.token_ids == fork.token_ids == [*range(1, 8), *[OTHER] * 7]
    assert (fork.num_cached_tokens, scheduler.kv.pool.num_used) == (4, 0)


def test_a_preempted_fork_shares_the_prompt_again_but_never_its_parents_output() -> None:
    """Without a prefix cache nothing says that the outputs are equal; here they are not."""
    scheduler = make_scheduler(num_blocks=7, prefix_caching=False)
    parent, fork = make_choices(2, range(1, 7), max_tokens=9)
    scheduler.add(parent, [fork])
    scheduler.add(make_request("other", range(21, 25), max_tokens=4))
    step(scheduler)
    for sampled in (7, 8, 9, 10, 11):
        step(scheduler, [sampled])
    scheduler._running.remove(fork)
    scheduler._preempt(fork)
    assert parent.num_computed_tokens == 11 and fork.num_tokens > 8
    [item] = [item for item in scheduler.schedule().scheduled if item.request_id == "p-1"]
    assert item.start == 4 and item.block_ids[0] == parent.block_ids[0]
    assert not set(item.block_ids[1:]) & set(parent.block_ids)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [4, 5, 6, 8, 20])
@pytest.mark.parametrize("budget", [1, 3, 64])
def test_four_choices_in_a_tiny_pool_all_end(num_blocks: int, budget: int, prefix_caching: bool) -> None:
    """Forks that could take their parent's room before it was done would wait for each other for ever."""
    scheduler = make_scheduler(num_blocks, max_num_batched_tokens=budget, prefix_caching=prefix_caching)
    parent, *forks = choices = make_choices(4, range(1, 8), max_tokens=5)
    scheduler.add(parent, forks)
    for _ in range(200):
        if scheduler.has_work:
            assert step(scheduler).scheduled
    for choice in choices:
        assert choice.token_ids == [*range(1, 8), *[OTHER] * 5]
        assert choice.finish_reason is FinishReason.LENGTH
    assert scheduler.kv.pool.num_used == 0


def test_a_parent_preempted_in_the_middle_of_its_prompt_keeps_its_forks_waiting() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=8, prefix_caching=False)
    scheduler.add(make_request("a", range(1, 9), max_tokens=4))
    parent, fork = make_choices(2, range(11, 21), max_tokens=1)
    scheduler.add(parent, [fork])
    step(scheduler)
    assert spans(step(scheduler)) == [("a", 8, 9), ("p", 0, 7)]
    assert step(scheduler).preempted_ids == ("p",)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    assert spans(step(scheduler)) == [("a", 10, 11), ("p", 0, 7)]
    while scheduler.has_work:
        step(scheduler)
    assert fork.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("taken", ["p", "p-1"])
def test_choices_are_added_together_or_not_at_all(taken: str) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(taken, [1]))
    parent, *forks = make_choices(3, [1, 2])
    with pytest.raises(InvalidParameterError, match=f"'{taken}' is in use"):
        scheduler.add(parent, forks)
    assert scheduler.num_waiting == 1
    assert scheduler.abort("p-2") is None


def test_two_choices_of_one_id_are_refused() -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidParameterError, match="'p' is in use"):
        scheduler.add(make_request("p", [1]), [make_request("p", [1])])
    assert not scheduler.has_work


# --- max_tokens 0, min_tokens ---


@pytest.mark.parametrize("sampled", [OTHER, EOS])
def test_max_tokens_0_only_computes_the_prompt(sampled: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    parent, fork = make_choices(2, range(1, 7), max_tokens=0)
    scheduler.add(parent, [fork])
    output = scheduler.schedule()
    assert complete(scheduler, output, [sampled]) == []
    output = scheduler.schedule()
    assert complete(scheduler, output, [sampled]) == [("p", ())]
    assert (parent.finish_reason, parent.num_output_tokens) == (FinishReason.LENGTH, 0)
    assert spans(step(scheduler, [sampled])) == [("p-1", 4, 6)]
    assert fork.finish_reason is FinishReason.LENGTH and not scheduler.has_work


@pytest.mark.parametrize(
    ("sampling", "banned"),
    [
        ({"min_tokens": 2}, {EOS}),
        ({"min_tokens": 2, "stop_token_ids": (8, 9)}, {EOS, 8, 9}),
        ({"min_tokens": 2, "stop_token_ids": (8, 9), "ignore_eos": True}, {8, 9}),
        ({"min_tokens": 2, "ignore_eos": True}, set()),
        ({"stop_token_ids": (8, 9)}, set()),
    ],
)
def test_end_tokens_are_banned_before_min_tokens(sampling: dict[str, Any], banned: set[int]) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("a", range(1, 7), **sampling))
    seen = [step(scheduler).scheduled[0].banned_ids for _ in range(5)]
    assert seen == [set(), banned, banned, set(), set()]  # a part of a prompt samples nothing


def test_a_banned_token_ends_nothing() -> None:
    """Where a runner has nothing else to choose, the output still gets its min_tokens."""
    scheduler = make_scheduler()
    request = make_request("a", [1], min_tokens=2, stop_token_ids=(8,))
    scheduler.add(request)
    output = scheduler.schedule()
    assert complete(scheduler, output, [EOS, 8, 8]) == [("a", (EOS, 8, 8))]
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, 8)


# --- logprobs ---


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0)


def take_in(scheduler: Scheduler, *results: RunnerResult) -> list[RequestNews]:
    return scheduler.update(scheduler.schedule(), RunnerOutput(results))


def test_logprobs_end_with_the_token_that_ends_the_request() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1], logprobs=0))
    [news] = take_in(scheduler, RunnerResult((7, EOS, 8), (entry(7), entry(EOS), entry(8))))
    assert (news.token_ids, news.logprobs) == ((7, EOS), (entry(7), entry(EOS)))


def test_prompt_logprobs_are_news_of_each_part_of_a_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    request = make_request("a", range(1, 8), prompt_logprobs=0)
    scheduler.add(request)
    [first] = take_in(scheduler, RunnerResult(prompt_logprobs=(entry(2), entry(3), entry(4), entry(5))))
    assert (first.request, first.token_ids, first.prompt_start) == (request, (), 1)
    assert [item.token_id for item in first.prompt_logprobs] == [2, 3, 4, 5]
    [second] = take_in(scheduler, RunnerResult((50,), prompt_logprobs=(entry(6), entry(7))))
    assert (second.token_ids, second.prompt_start, len(second.prompt_logprobs)) == ((50,), 5, 2)
    output = scheduler.schedule()
    assert not output.scheduled[0].wants_prompt_logprobs
    assert (request.num_tokens, output.scheduled[0].start) == (8, 7)


def test_prompt_logprobs_do_not_read_the_prefix_cache_and_fill_it() -> None:
    """Bug: what was found in the cache had no logprobs; the answer lacked the beginning of the prompt."""
    scheduler = make_scheduler()
    for request_id in "ab":
        request = make_request(request_id, range(1, 10), max_tokens=1, prompt_logprobs=1)
        scheduler.add(request)
        output = step(scheduler)
        assert spans(output) == [(request_id, 0, 9)] and output.scheduled[0].wants_prompt_logprobs
        assert request.num_cached_tokens == 0
    assert scheduler.kv.num_prefix_query_tokens == 0
    scheduler.add(make_request("c", range(1, 10), max_tokens=1))
    output = step(scheduler)
    assert spans(output) == [("c", 8, 9)] and not output.scheduled[0].wants_prompt_logprobs


def test_prompt_logprobs_are_owed_again_after_a_preemption_in_the_prompt() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=8)
    scheduler.add(make_request("a", range(1, 9), max_tokens=9))
    request = make_request("b", range(11, 21), max_tokens=2, prompt_logprobs=0)
    scheduler.add(request)
    seen = []
    while scheduler.has_work:
        for item in step(scheduler).scheduled:
            if item.request_id == "b":
                seen.append((item.start, item.end, item.wants_prompt_logprobs))
    assert seen == [(0, 7, True), (0, 7, True), (0, 8, True), (8, 10, True), (10, 11, False)]
    assert request.num_preemptions == 2


def test_after_its_first_token_a_request_with_prompt_logprobs_is_like_any_other() -> None:
    """Nothing of the prompt is owed any more: resumed after a preemption, it reads the prefix cache."""
    scheduler = make_scheduler(num_blocks=7)
    scheduler.add(make_request("a", range(1, 8), max_tokens=3))
    scheduler.add(make_request("b", range(11, 27), max_tokens=6, prompt_logprobs=0))
    step(scheduler)
    assert step(scheduler).preempted_ids == ("b",)
    step(scheduler)
    [item] = step(scheduler).scheduled
    assert (item.request_id, item.start, item.end, item.wants_prompt_logprobs) == ("b", 12, 17, False)


def test_a_fork_reads_what_a_parent_with_prompt_logprobs_computed() -> None:
    scheduler = make_scheduler()
    parent, fork = make_request("p", range(1, 10), prompt_logprobs=0), make_request("p-1", range(1, 10))
    scheduler.add(parent, [fork])
    step(scheduler)
    output = step(scheduler)
    assert spans(output) == [("p", 9, 10), ("p-1", 8, 9)]
    assert not any(item.wants_prompt_logprobs for item in output.scheduled)


# --- errors ---


def test_an_error_ends_one_request_and_frees_its_blocks() -> None:
    scheduler = make_scheduler()
    bad, good = make_request("bad", range(1, 6)), make_request("good", range(11, 16))
    scheduler.add(bad)
    scheduler.add(good)
    first, second = take_in(scheduler, RunnerResult(error="broken"), RunnerResult((7,)))
    assert (first.request, first.error, first.token_ids) == (bad, "broken", ())
    assert (second.request, second.error, second.token_ids) == (good, None, (7,))
    assert (bad.status, bad.finish_reason, bad.block_ids) == (RequestStatus.FINISHED, FinishReason.ERROR, [])
    assert spans(step(scheduler)) == [("good", 5, 6)]
    scheduler.abort("good")
    assert scheduler.kv.pool.num_used == 0


def test_blocks_of_a_failed_request_are_never_found_again() -> None:
    """NaN written by one chunk showed only when a later one was sampled, and was served to the next equal prompt."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("bad", range(1, 13)))
    step(scheduler)
    assert scheduler.kv.find_cached_prefix(make_request("look", range(1, 13))) == [1, 2]
    take_in(scheduler, RunnerResult(error="broken"))
    again = make_request("again", range(1, 13))
    scheduler.add(again)
    assert spans(step(scheduler)) == [("again", 0, 8)]
    assert scheduler.kv.find_cached_prefix(make_request("look", range(1, 13))) == again.block_ids


def test_memory_of_a_failed_request_is_cleared_before_its_next_use() -> None:
    """NaN in the unused slots of a block that a failed request had left made its next owner fail, too."""
    scheduler = make_scheduler()
    scheduler.add(make_request("bad", range(1, 6)))
    step(scheduler)
    take_in(scheduler, RunnerResult(error="broken"))
    scheduler.add(make_request("next", range(11, 24)))
    assert [step(scheduler).blocks_to_clear, step(scheduler).blocks_to_clear] == [(1, 2), ()]


@pytest.mark.parametrize("num_steps", [1, 2])
def test_memory_that_no_token_came_out_of_is_cleared_before_its_next_use(num_steps: int) -> None:
    """Aborted in the middle of its prompt, a request leaves KV that nobody has ever looked at."""
    scheduler = make_scheduler(max_num_batched_tokens=6)
    scheduler.add(make_request("a", range(1, 9)))
    for _ in range(num_steps):
        step(scheduler)
    scheduler.abort("a")
    scheduler.add(make_request("b", range(11, 20), max_tokens=5))
    assert step(scheduler).blocks_to_clear == ((2,) if num_steps == 1 else ())
    while scheduler.has_work:
        assert step(scheduler).blocks_to_clear == ()


def test_forks_of_a_parent_that_failed_start_over() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    parent, *forks = make_choices(3, range(1, 13), max_tokens=1)
    scheduler.add(parent, forks)
    step(scheduler)
    [news] = take_in(scheduler, RunnerResult(error="broken"))
    assert news.request is parent
    assert spans(step(scheduler)) == [("p-1", 0, 8)]
    while scheduler.has_work:
        step(scheduler)
    assert [fork.finish_reason for fork in forks] == [FinishReason.LENGTH] * 2
    assert scheduler.kv.pool.num_used == 0


def test_forks_of_a_parent_that_failed_and_of_one_that_did_not_keep_their_order() -> None:
    """Those of the failed parent came first into the queue, and were then overtaken."""
    scheduler = make_scheduler(max_num_seqs=2)
    for prefix, first_token in (("a", 1), ("b", 21)):
        prompt = range(first_token, first_token + 6)
        scheduler.add(make_request(prefix, prompt, max_tokens=1), [make_request(f"{prefix}1", prompt)])
    take_in(scheduler, RunnerResult(error="broken"), RunnerResult((7,)))
    assert spans(step(scheduler)) == [("a1", 0, 6), ("b1", 4, 6)]


# --- priorities: lower first, and within one first come first served ---


def urgent(request_id: str, priority: int, token_ids: Sequence[int], **sampling: Any) -> Request:
    request = make_request(request_id, token_ids, **sampling)
    request.priority = priority
    return request


def test_lower_priorities_are_admitted_first() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id, priority in (("a", 5), ("b", 0), ("c", -1), ("d", 0)):
        scheduler.add(urgent(request_id, priority, [1, 2], max_tokens=1))
    assert [spans(step(scheduler)) for _ in range(2)] == [[("c", 0, 2), ("b", 0, 2)], [("d", 0, 2), ("a", 0, 2)]]


def test_who_is_more_urgent_has_the_budget_first() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(urgent("a", 1, [1, 2]))
    assert spans(step(scheduler)) == [("a", 0, 2)]
    scheduler.add(urgent("b", 0, range(11, 19)))
    assert spans(step(scheduler)) == [("a", 2, 3), ("b", 0, 3)]
    assert spans(step(scheduler)) == [("b", 3, 7)], "nothing is left for a"
    assert spans(step(scheduler)) == [("b", 7, 8), ("a", 3, 4)]


def test_the_least_urgent_is_preempted_and_waits_behind_the_more_urgent() -> None:
    """First come first served would take the blocks of the newest, b."""
    scheduler = make_scheduler(num_blocks=5, max_model_len=17)
    a, b = urgent("a", 1, range(1, 9)), urgent("b", 0, range(11, 18))
    scheduler.add(a)
    step(scheduler)
    scheduler.add(b)
    assert spans(step(scheduler)) == [("a", 8, 9)], "b does not fit, and waits"
    scheduler.abort("a")
    a = urgent("a", 1, range(1, 4))
    scheduler.add(a)
    assert spans(step(scheduler)) == [("b", 0, 7), ("a", 0, 3)]
    while scheduler.num_preemptions == 0:
        output = step(scheduler)
    assert output.preempted_ids == ("a",) and a.status is RequestStatus.WAITING and b.status is RequestStatus.RUNNING
    scheduler.add(urgent("c", 0, [31, 32]))
    scheduler.abort("b")
    assert [item.request_id for item in step(scheduler).scheduled] == ["c", "a"]


def test_an_urgent_request_takes_no_seat_of_one_that_runs() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(urgent("a", 1, [1, 2], max_tokens=2))
    step(scheduler)
    scheduler.add(urgent("b", 0, [3, 4]))
    assert spans(step(scheduler)) == [("a", 2, 3)]
    assert spans(step(scheduler)) == [("b", 0, 2)]


def test_nobody_less_urgent_overtakes_one_that_does_not_fit() -> None:
    scheduler = make_scheduler(num_blocks=5)
    scheduler.add(urgent("a", 1, range(1, 9), max_tokens=2))
    step(scheduler)
    scheduler.add(urgent("small", 1, [31]))
    scheduler.add(urgent("big", 0, range(11, 23)))
    assert spans(step(scheduler)) == [("a", 8, 9)]
    assert spans(step(scheduler)) == [("big", 0, 12), ("small", 0, 1)]


def test_forks_follow_their_parent_before_others_of_its_priority() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    choices = make_choices(3, [1, 2, 3, 4, 5], max_tokens=1)
    for choice in choices:
        choice.priority = 3
    scheduler.add(urgent("late", 5, [7]))
    scheduler.add(choices[0], choices[1:])
    scheduler.add(urgent("same", 3, [8], max_tokens=1))
    scheduler.add(urgent("first", 0, [9], max_tokens=1))
    order = [item.request_id for _ in range(3) for item in step(scheduler).scheduled]
    assert order == ["first", "p", "p-1", "p-2", "same", "late"]


def test_the_order_of_a_long_queue() -> None:
    """Of so many requests, a queue that is sorted again for each would take minutes."""
    scheduler = make_scheduler(num_blocks=1000, max_num_seqs=200, max_num_batched_tokens=1000)
    for index in range(10_000):
        scheduler.add(urgent(f"r{index}", index * 7 % 100, [index], max_tokens=1))
    order: list[int] = []
    while scheduler.has_work:
        order += [item.token_ids[0] for item in step(scheduler).scheduled]
    assert order == sorted(range(10_000), key=lambda index: (index * 7 % 100, index))
