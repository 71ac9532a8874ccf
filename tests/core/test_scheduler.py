"""The policy of the scheduler, step by step, with exact block ids. A fake runner samples what the test says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from miniserve.core.kv_cache_manager import KVCacheManager
from miniserve.core.request import Request, RequestStatus
from miniserve.core.schedule import RunnerOutput, SchedulerOutput
from miniserve.core.scheduler import Scheduler
from miniserve.errors import ConfigError, ContextLengthError, InvalidParameterError
from miniserve.outputs import FinishReason
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


def complete(scheduler: Scheduler, output: SchedulerOutput, sampled: Sequence[int] = (OTHER,)) -> list[Any]:
    tokens = tuple(tuple(sampled) if item.samples else () for item in output.scheduled)
    return [(request.request_id, new) for request, new in scheduler.update(output, RunnerOutput(tokens))]


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
