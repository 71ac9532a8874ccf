"""What holds whatever happens: random lives of requests over a runner that remembers what it wrote where.

Its next token depends on the whole prefix, so that the right tokens of any request can be told in advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from miniserve.core.kv_cache_manager import KVCacheManager
from miniserve.core.request import Request, RequestStatus
from miniserve.core.schedule import RunnerOutput, RunnerResult, ScheduledRequest, SchedulerOutput
from miniserve.core.scheduler import RequestNews, Scheduler
from miniserve.errors import ContextLengthError
from miniserve.outputs import FinishReason, TokenLogprobs
from miniserve.sampling_params import SamplingParams
from tests.core.line import Line
from tests.core.shadow import ShadowCache, check_blocks

EOS = 0
NUM_OUTPUT_IDS = 12  # so that one token in twelve is EOS


def next_token(token_ids: Sequence[int], banned_ids: frozenset[int] = frozenset()) -> int:
    """The script: what a greedy model would say."""
    token_id = crc32(bytes(token_ids)) % NUM_OUTPUT_IDS
    while token_id in banned_ids:
        token_id = (token_id + 1) % NUM_OUTPUT_IDS
    return token_id


def expected_end(
    prompt: Sequence[int], sampling: SamplingParams, max_total_tokens: int
) -> tuple[list[int], FinishReason]:
    """The output of a request that is left alone, from the script and the rules for the end."""
    token_ids = list(prompt)
    if sampling.max_tokens == 0:
        return [], FinishReason.LENGTH
    end_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else {EOS})
    while True:
        may_end = len(token_ids) - len(prompt) >= sampling.min_tokens
        token_ids.append(next_token(token_ids, frozenset() if may_end else end_ids))
        output = token_ids[len(prompt) :]
        if (output[-1] == EOS and not sampling.ignore_eos) or output[-1] in sampling.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) == sampling.max_tokens or len(token_ids) == max_total_tokens:
            return output, FinishReason.LENGTH


class ShadowRunner(ShadowCache):
    """Computes by the script."""

    def execute(
        self, output: SchedulerOutput, salts: dict[str, bytes], failing: frozenset[str] = frozenset()
    ) -> RunnerOutput:
        """Compute a step; what the `failing` requests write is useless, and they get an error."""
        self.compute(output, salts, failing)
        return RunnerOutput(tuple(self._result(item, item.request_id in failing) for item in output.scheduled))

    def _result(self, item: ScheduledRequest, fails: bool) -> RunnerResult:
        if fails:
            return RunnerResult(error="broken")
        token_ids = (next_token(item.token_ids, item.banned_ids),) if item.samples else ()
        following: Sequence[int] = ()
        if item.wants_prompt_logprobs:
            following = item.token_ids[item.start + 1 : min(item.end + 1, item.num_prompt_tokens)]
        return RunnerResult(token_ids, prompt_logprobs=tuple(TokenLogprobs(token_id, -1.0) for token_id in following))


@dataclass
class Life:
    """What the model knows of a request."""

    request: Request
    prompt: list[int]
    output: list[int]
    reason: FinishReason
    stopped_from_outside: bool = False
    num_cached_tokens: int | None = None
    prompt_logprobs: dict[int, int] = field(default_factory=dict)  # position -> token id


class SchedulerMachine(RuleBasedStateMachine):
    """Add, abort, finish, fail and step in any order; the invariants are checked after every rule.

    In half of the lives all requests have one priority: first come first served.
    """

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        num_blocks=st.integers(3, 14),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(1, 12),
        max_model_len=st.integers(6, 40),
        prefix_caching=st.sampled_from([True, True, True, False]),
        priorities=st.sampled_from([(0,), (-1, 0, 7)]),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        max_model_len: int,
        prefix_caching: bool,
        priorities: tuple[int, ...],
    ) -> None:
        self.priorities = priorities
        self.scheduler = Scheduler(
            KVCacheManager(num_blocks, block_size, prefix_caching),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
        )
        self.runner = ShadowRunner(self.scheduler)
        self.max_total_tokens = min(max_model_len, (num_blocks - 1) * block_size)
        self.lives: dict[str, Life] = {}
        self.line = Line()
        self.old_sequences: list[list[int]] = []
        self.num_added = 0

    @rule(
        tail=st.lists(st.integers(1, 2), min_size=1, max_size=14),
        history=st.none() | st.integers(0, 100),
        salt=st.sampled_from([b"", b"", b"", b"tenant"]),
        max_tokens=st.none() | st.integers(0, 12),
        min_tokens=st.sampled_from([0, 0, 3, 6]),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (), (3,)]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        num_choices=st.sampled_from([1, 1, 2, 4]),
        same_again=st.booleans(),
        urgency=st.integers(0, 100),
    )
    def add(
        self,
        tail: list[int],
        history: int | None,
        salt: bytes,
        num_choices: int,
        same_again: bool,
        min_tokens: int,
        max_tokens: int | None,
        urgency: int,
        **sampling: Any,
    ) -> None:
        prompt = tail
        if history is not None and self.old_sequences:  # a next turn
            prompt = [*self.old_sequences[history % len(self.old_sequences)], *tail]
        min_tokens = min_tokens if max_tokens is None else min(min_tokens, max_tokens)
        params = SamplingParams(min_tokens=min_tokens, max_tokens=max_tokens, **sampling)
        for _ in range(1 + same_again):
            self._add(prompt, salt, params, num_choices, self.priorities[urgency % len(self.priorities)])

    def _add(self, prompt: list[int], salt: bytes, sampling: SamplingParams, num_choices: int, priority: int) -> None:
        without = replace(sampling, prompt_logprobs=None)
        requests = [
            Request(
                f"r{self.num_added + index}",
                list(prompt),
                without if index else sampling,
                frozenset({EOS}),
                salt,
                priority,
            )
            for index in range(num_choices)
        ]
        self.num_added += num_choices
        if len(prompt) + 1 > self.max_total_tokens:
            with pytest.raises(ContextLengthError):
                self.scheduler.add(requests[0], requests[1:])
            return
        self.scheduler.add(requests[0], requests[1:])
        for request in requests:
            expected = expected_end(prompt, request.sampling, self.max_total_tokens)
            self.lives[request.request_id] = Life(request, list(prompt), *expected)
        self.line.add(requests[0], requests[1:])

    def _pick(self, index: int) -> Request:
        """Any request that has not ended, and is about to."""
        request = self.line.pick(index)
        self.line.take_out(request)
        return request

    @precondition(lambda self: self.line.live)
    @rule(index=st.integers(0, 100))
    def abort(self, index: int) -> None:
        request = self._pick(index)
        assert self.scheduler.abort(request.request_id) is request
        assert request.finish_reason is FinishReason.ABORT
        self._stopped_from_outside(request)

    @precondition(lambda self: self.line.live)
    @rule(index=st.integers(0, 100))
    def finish(self, index: int) -> None:
        request = self._pick(index)
        self.scheduler.finish(request, FinishReason.STOP, "stop string")
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "stop string")
        self._stopped_from_outside(request)

    @precondition(lambda self: self.line.live)
    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.line.live:
                self._update(self._schedule())

    @precondition(lambda self: self.line.live)
    @rule(index=st.integers(0, 100), executed=st.booleans())
    def step_with_an_abort_on_the_way(self, index: int, executed: bool) -> None:
        output = self._schedule()
        runner_output = self._execute(output) if executed else None
        self.abort(index)
        self._update(output, runner_output)

    @precondition(lambda self: self.line.live)
    @rule(index=st.integers(0, 100), as_well=st.booleans())
    def step_with_an_error(self, index: int, as_well: bool) -> None:
        output = self._schedule()
        ids = [item.request_id for item in output.scheduled]
        failing = frozenset([ids[index % len(ids)], *(ids[:1] if as_well else ())])
        self._update(output, self._execute(output, failing))
        for item in output.scheduled:
            if item.request_id in failing:
                assert not any(self.scheduler.kv.pool._is_findable(block_id) for block_id in item.block_ids)

    def _schedule(self) -> SchedulerOutput:
        running = [request.request_id for request in self.scheduler._running]
        output = self.scheduler.schedule()
        self.line.check_step(output, running)
        assert output.num_tokens <= self.scheduler.max_num_batched_tokens
        for item in output.scheduled:
            self._check_item(item)
        return output

    def _check_item(self, item: ScheduledRequest) -> None:
        life = self.lives[item.request_id]
        assert len(item.block_ids) == -(-item.end // self.scheduler.kv.block_size)
        assert item.samples == (item.end == len(item.token_ids))
        assert item.num_prompt_tokens == len(life.prompt)
        assert item.wants_prompt_logprobs == (
            life.request.sampling.prompt_logprobs is not None and len(item.token_ids) == len(life.prompt)
        )
        if life.num_cached_tokens is None:
            life.num_cached_tokens = item.start
            assert not (item.wants_prompt_logprobs and item.start > 0)
        assert life.request.num_cached_tokens == life.num_cached_tokens

    def _execute(self, output: SchedulerOutput, failing: frozenset[str] = frozenset()) -> RunnerOutput:
        salts = {request_id: life.request.cache_salt for request_id, life in self.lives.items()}
        return self.runner.execute(output, salts, failing)

    def _update(self, output: SchedulerOutput, runner_output: RunnerOutput | None = None) -> None:
        runner_output = runner_output or self._execute(output)
        live_ids = {request.request_id for request in self.line.live}
        taken = [
            (item, result)
            for item, result in zip(output.scheduled, runner_output.results, strict=True)
            if item.request_id in live_ids
        ]
        news = self.scheduler.update(output, runner_output)
        assert [item.request.request_id for item in news] == [
            item.request_id for item, result in taken if result.token_ids or result.prompt_logprobs or result.error
        ]
        for one in news:
            self._check_news(one)
            if one.request.status is RequestStatus.FINISHED:
                self.line.live.remove(one.request)
                self.old_sequences.append(one.request.token_ids)
        self.line.release([self.lives[item.request_id].request for item, _ in taken if self._has_prompt(item)])

    def _has_prompt(self, item: ScheduledRequest) -> bool:
        """Whether its forks no longer wait for it: it has computed its prompt, or failed."""
        life = self.lives[item.request_id]
        return item.end >= len(life.prompt) or life.request.finish_reason is not None

    def _check_news(self, news: RequestNews) -> None:
        life = self.lives[news.request.request_id]
        for position, entry in enumerate(news.prompt_logprobs, start=news.prompt_start):
            life.prompt_logprobs[position] = entry.token_id
        if news.error is not None:
            assert (news.token_ids, news.request.finish_reason) == ((), FinishReason.ERROR)
            life.stopped_from_outside = True
        elif news.token_ids:
            assert tuple(news.request.token_ids[-len(news.token_ids) :]) == news.token_ids
        self._check_tokens(life)

    def _check_tokens(self, life: Life) -> None:
        request = life.request
        assert request.token_ids[: request.num_prompt_tokens] == life.prompt
        output = request.token_ids[request.num_prompt_tokens :]
        assert output == life.output[: len(output)]
        if life.stopped_from_outside:
            return
        ended = request.status is RequestStatus.FINISHED
        has_prompt = request.num_computed_tokens >= request.num_prompt_tokens
        assert ended == (len(output) == len(life.output) and has_prompt)
        if ended:
            assert request.finish_reason is life.reason
            if request.sampling.prompt_logprobs is not None:
                assert life.prompt_logprobs == dict(enumerate(life.prompt[1:], start=1))

    def _stopped_from_outside(self, request: Request) -> None:
        life = self.lives[request.request_id]
        life.stopped_from_outside = True
        self._check_tokens(life)
        self.old_sequences.append(request.token_ids)

    @invariant()
    def blocks_are_right(self) -> None:
        if hasattr(self, "scheduler"):
            check_blocks(self.scheduler, self.runner)

    @invariant()
    def requests_are_right(self) -> None:
        if hasattr(self, "scheduler"):
            self.line.check(self.scheduler)

    @invariant()
    def statistics_are_right(self) -> None:
        if hasattr(self, "scheduler"):
            kv = self.scheduler.kv
            asked = [
                life
                for life in self.lives.values()
                if life.num_cached_tokens is not None
                and not life.request.is_fork
                and life.request.sampling.prompt_logprobs is None
            ]
            assert kv.num_prefix_query_tokens == (sum(len(life.prompt) for life in asked) if kv.prefix_caching else 0)
            assert kv.num_prefix_hit_tokens == sum(life.num_cached_tokens or 0 for life in asked)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        num_unfinished = self.scheduler.num_running + self.scheduler.num_waiting
        # Each is the first for at most so many steps, twice if one more urgent comes between.
        for _ in range(2 * num_unfinished * self.max_total_tokens):
            if not self.line.live:
                break
            self._update(self._schedule())
        assert not self.line.live and not self.scheduler.has_work
        assert self.scheduler.kv.pool.num_used == 0
        check_blocks(self.scheduler, self.runner)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def run_all(
    prompts: Sequence[Sequence[int]],
    *,
    num_blocks: int = 200,
    block_size: int = 4,
    budget: int = 64,
    prefix_caching: bool = True,
) -> list[Request]:
    """Run all prompts together, checked at each step, until all are done."""
    scheduler = Scheduler(
        KVCacheManager(num_blocks, block_size, prefix_caching),
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        max_model_len=1000,
    )
    runner = ShadowRunner(scheduler)
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [Request(f"r{index}", list(prompt), sampling) for index, prompt in enumerate(prompts)]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        output = scheduler.schedule()
        assert output.scheduled
        scheduler.update(output, runner.execute(output, {request.request_id: b"" for request in requests}))
        check_blocks(scheduler, runner)
    return requests


MIXED_PROMPTS = [[1] * 15, [1] * 16, [1] * 17, [1] * 16, [2] * 3, [1] * 16 + [2] * 9, [3], [2] * 30]
MIXED_OUTPUTS = [
    expected_end(prompt, SamplingParams(max_tokens=20, ignore_eos=True), 1000)[0] for prompt in MIXED_PROMPTS
]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [200, 51, 8])  # multiplied below for blocks smaller than 8
@pytest.mark.parametrize("budget", [1, 7, 16, 64, 1000])
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_tokens_do_not_depend_on_chunks_blocks_neighbours_or_preemption(
    block_size: int, budget: int, num_blocks: int, prefix_caching: bool
) -> None:
    """A cache so small that requests are computed again gave doubled or missing output."""
    num_blocks *= max(1, 8 // block_size)
    requests = run_all(
        MIXED_PROMPTS,
        num_blocks=num_blocks,
        block_size=block_size,
        budget=budget,
        prefix_caching=prefix_caching,
    )
    assert [request.token_ids[request.num_prompt_tokens :] for request in requests] == MIXED_OUTPUTS


def test_many_sequences_in_a_full_cache_preempt_and_resume_on_a_prefix_hit() -> None:
    """Block counts taken before the hit was known broke the block table of a request that resumed."""
    prompts = [[1] * 12 + [2] * index for index in range(12)]
    requests = run_all(prompts, num_blocks=14, block_size=4, budget=20)
    assert sum(request.num_preemptions for request in requests) >= 5
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.num_prompt_tokens == len(prompt)
        assert request.token_ids[len(prompt) :] == expected_end(prompt, sampling, 1000)[0]
