"""Who computes how many tokens in the next step. Owns all requests in the engine, from `add` to their end.

There are no phases: each step moves a request's `num_computed_tokens` towards its `num_tokens`. Prefill and decode
are words for many new tokens and for one; chunked prefill, prefix hits and preemption follow from that one rule.

Does not know how tokens are computed: the engine hands its output to a runner, and the runner's back to `update`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from miniserve.core.kv_cache_manager import KVCacheManager
from miniserve.core.request import Request, RequestStatus
from miniserve.core.schedule import RunnerOutput, ScheduledRequest, SchedulerOutput
from miniserve.errors import ConfigError, ContextLengthError, InvalidParameterError
from miniserve.outputs import FinishReason


class Scheduler:
    """Continuous batching, first come first served, over a paged KV cache.

    `running` and then `waiting` hold the requests in order of arrival, always: a preempted request is the newest
    running one, and goes to the front of the queue. So the oldest request is computed in every step (it may take
    the blocks of all others, and is never longer than the pool), and every request becomes the oldest in time.

    Attributes:
        num_preemptions: how often a request lost its blocks, over all requests so far.

    Raises:
        ConfigError: a limit is below 1.
    """

    def __init__(
        self, kv: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
        }
        for name, value in limits.items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.num_preemptions = 0
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        """Requests that hold KV blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, new or preempted."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue.

        Raises:
            ContextLengthError: the prompt and one output token can never fit.
            InvalidParameterError: the prompt is empty, or the id is in use.
        """
        assert request.status is RequestStatus.WAITING and not request.block_ids, "a request is added once"
        if request.request_id in self._requests:
            raise InvalidParameterError(f"request id {request.request_id!r} is in use", param="request_id")
        self._check_length(request.num_prompt_tokens)
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request, waiting or running, at once. None: it is not here, or has finished already."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.ABORT)
        return request

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request for a reason found outside, and free its blocks.

        If `update` has just ended it, only the reason changes: a stop string that the last allowed token completes
        is a stop, not a length.
        """
        if request.status is not RequestStatus.FINISHED:
            self._remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def schedule(self) -> SchedulerOutput:
        """Choose the tokens of the next step and give them KV blocks. Never empty while there is work."""
        scheduled: list[ScheduledRequest] = []
        preempted: list[Request] = []
        budget = self._schedule_running(scheduled, preempted)
        # What a preemption freed is for those who run: a newcomer would take it and be the next to lose it.
        if not preempted:
            self._admit_waiting(scheduled, budget)
        return SchedulerOutput(tuple(scheduled), tuple(request.request_id for request in preempted))

    def update(self, output: SchedulerOutput, runner_output: RunnerOutput) -> list[tuple[Request, tuple[int, ...]]]:
        """Take in what the runner computed for `output`: the new tokens of each request that got some, in order.

        Tokens after the one that ends a request are dropped. Requests that ended since `schedule` are skipped.
        """
        news = []
        for item, sampled in zip(output.scheduled, runner_output.token_ids, strict=True):
            request = self._requests.get(item.request_id)
            # The id may be back already, with a new request behind it: the token list tells them apart.
            if request is None or request.token_ids is not item.token_ids:
                continue
            request.num_computed_tokens = item.end
            self.kv.cache_computed_blocks(request)
            token_ids = self._append_tokens(request, sampled)
            if token_ids:
                news.append((request, token_ids))
        return news

    def _check_length(self, num_prompt_tokens: int) -> None:
        if num_prompt_tokens == 0:
            raise InvalidParameterError("the prompt has no tokens", param="prompt")
        for limit, name in (
            (self.max_model_len, "context (max_model_len)"),
            (self.kv.capacity_tokens, "KV cache"),
        ):
            if num_prompt_tokens + 1 > limit:
                raise ContextLengthError(
                    f"the prompt has {num_prompt_tokens} tokens and needs room for one more, but the {name} holds "
                    f"{limit} tokens; shorten the prompt",
                    param="prompt",
                )

    def _schedule_running(self, scheduled: list[ScheduledRequest], preempted: list[Request]) -> int:
        """Phase 1, oldest first. Returns the budget that is left, in tokens."""
        budget = self.max_num_batched_tokens
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            num_new_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if not self._make_room(request, num_new_tokens, preempted):
                break
            scheduled.append(_scheduled(request, num_new_tokens))
            budget -= num_new_tokens
            index += 1
        return budget

    def _make_room(self, request: Request, num_new_tokens: int, preempted: list[Request]) -> bool:
        """Preempt the newest requests until `request` has its blocks. False: it was itself the newest.

        Nobody whose tokens are in this step already can be hit, as they are older: no budget has to be refunded.
        """
        while not self.kv.allocate(request, num_new_tokens):
            victim = self._running.pop()
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Take all blocks; the request starts over later, with its output kept and what is still cached."""
        self.kv.free(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(request)

    def _admit_waiting(self, scheduled: list[ScheduledRequest], budget: int) -> None:
        """Phase 2, first come first served: if the first in the queue does not fit, nobody overtakes it."""
        while self._waiting and budget > 0 and len(self._running) < self.max_num_seqs:
            request = self._waiting[0]
            cached_blocks = self.kv.find_cached_prefix(request)
            num_cached_tokens = len(cached_blocks) * self.kv.block_size
            num_new_tokens = min(request.num_tokens - num_cached_tokens, budget)
            if not self.kv.allocate(request, num_new_tokens, cached_blocks):
                break
            self._running.append(self._waiting.popleft())
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_cached_tokens
            if request.num_preemptions == 0:
                request.num_cached_tokens = num_cached_tokens
            scheduled.append(_scheduled(request, num_new_tokens))
            budget -= num_new_tokens

    def _append_tokens(self, request: Request, sampled: Sequence[int]) -> tuple[int, ...]:
        """Append one by one until one ends the request. Returns those appended."""
        for count, token_id in enumerate(sampled, start=1):
            request.token_ids.append(token_id)
            self._finish_if_over(request, token_id)
            if request.status is RequestStatus.FINISHED:
                return tuple(sampled[:count])
        return tuple(sampled)

    def _finish_if_over(self, request: Request, token_id: int) -> None:
        sampling = request.sampling
        if token_id in request.eos_token_ids and not sampling.ignore_eos:
            self.finish(request, FinishReason.STOP)
        elif token_id in sampling.stop_token_ids:
            self.finish(request, FinishReason.STOP, token_id)
        elif request.num_output_tokens == sampling.max_tokens or request.num_tokens >= self._max_total_tokens:
            self.finish(request, FinishReason.LENGTH)

    @property
    def _max_total_tokens(self) -> int:
        """A request that grew beyond the pool could not run even alone, and would preempt itself for ever."""
        return min(self.max_model_len, self.kv.capacity_tokens)

    def _remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self.kv.free(request)


def _scheduled(request: Request, num_new_tokens: int) -> ScheduledRequest:
    start = request.num_computed_tokens
    end = start + num_new_tokens
    return ScheduledRequest(
        request_id=request.request_id,
        token_ids=request.token_ids,
        start=start,
        end=end,
        block_ids=request.block_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        samples=end == request.num_tokens,
    )
