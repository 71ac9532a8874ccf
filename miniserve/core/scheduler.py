"""Who computes how many tokens in the next step. Owns all requests in the engine, from `add` to their end.

There are no phases: each step moves a request's `num_computed_tokens` towards its `num_tokens`. Prefill and decode
are words for many new tokens and for one; chunked prefill, prefix hits and preemption follow from that one rule.

Does not know how tokens are computed: the engine hands its output to a runner, and the runner's back to `update`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from miniserve.core.kv_cache_manager import KVCacheManager
from miniserve.core.request import Request, RequestStatus
from miniserve.core.request_queue import RequestQueue
from miniserve.core.schedule import RunnerOutput, RunnerResult, ScheduledRequest, SchedulerOutput
from miniserve.errors import ConfigError, ContextLengthError, InvalidParameterError
from miniserve.outputs import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class RequestNews:
    """What `Scheduler.update` took in for one request; the `Request` itself has changed already.

    Attributes:
        token_ids, logprobs: of the tokens that were appended, up to the one that ended the request.
        prompt_logprobs: as the runner gave them; the first belongs to the prompt token at `prompt_start`.
        error: why the runner could not go on with it: the request has ended with `FinishReason.ERROR`.
    """

    request: Request
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_start: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


class Scheduler:
    """Continuous batching, by priority and then first come first served, over a paged KV cache.

    Among requests of one priority, `running` and then `waiting` hold them in the order of arrival: a preempted request
    is the newest running one, and goes to the front of the queue. So the oldest request is computed in every step (it
    may take the blocks of all others, and is never longer than the pool), and every request becomes the oldest in time.

    Forks, further choices of one prompt, wait beside the queue until their parent has computed it; then they go to the
    queue's front, where they find it done. Nobody else ever gets in front of a request.

    Lower priorities come first, in both lists: they are admitted first, get the budget of a step first, and lose their
    blocks last. Who runs gives up blocks only to others who run, so an urgent newcomer waits until there is room, with
    nobody less urgent being admitted meanwhile. The price: a request waits, or is preempted again and again, for as
    long as more urgent ones keep coming. Where all have one priority, all of this is first come first served.

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
        self._waiting = RequestQueue()
        self._forks: dict[Request, list[Request]] = {}  # those that still wait for their parent

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
        """Requests that hold no KV blocks: new or preempted ones, and forks that wait for their parent."""
        return len(self._requests) - len(self._running)

    def add(self, request: Request, forks: Sequence[Request] = ()) -> None:
        """Put a new request behind those of its priority, and let its forks, of the same prompt, wait for it.

        Raises:
            ContextLengthError: the prompt and one output token can never fit.
            InvalidParameterError: the prompt is empty, or an id is in use. Nothing was added then.
        """
        choices = {choice.request_id: choice for choice in (request, *forks)}
        assert all(choice.status is RequestStatus.WAITING for choice in choices.values()), "a request is added once"
        in_use = self._requests.keys() & choices
        if in_use or len(choices) != 1 + len(forks):
            request_id = min(in_use, default=request.request_id)
            raise InvalidParameterError(f"request id {request_id!r} is in use", param="request_id")
        self._check_length(request.num_prompt_tokens)
        self._requests.update(choices)
        self._waiting.append(request)
        for fork in forks:
            assert fork.token_ids == request.token_ids and fork.cache_salt == request.cache_salt
            assert fork.priority == request.priority
            fork.parent = request
        if forks:
            self._forks[request] = list(forks)

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
        return SchedulerOutput(
            tuple(scheduled),
            preempted_ids=tuple(request.request_id for request in preempted),
            blocks_to_clear=self.kv.pool.take_blocks_to_clear(),
        )

    def update(self, output: SchedulerOutput, runner_output: RunnerOutput) -> list[RequestNews]:
        """Take in what the runner computed for `output`.

        Tokens after the one that ends a request are dropped. Requests that ended since `schedule` are skipped.

        Returns:
            In the order of the step, the news of each request that got tokens, prompt logprobs or an error, or ended.
        """
        news: list[RequestNews] = []
        released: list[Request] = []
        for item, result in zip(output.scheduled, runner_output.results, strict=True):
            request = self._requests.get(item.request_id)
            # The id may be back already, with a new request behind it: the token list tells them apart.
            if request is None or request.token_ids is not item.token_ids:
                continue
            if result.error is not None or item.end >= request.num_prompt_tokens:
                released += self._forks.pop(request, ())  # there is nothing to wait for any more
            news += self._take_in(request, item, result)
        self._waiting.put_back(released)
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
        """Phase 1, in order. Returns the budget that is left, in tokens."""
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
        """Preempt the last running requests until `request` has its blocks. False: it was itself the last.

        Nobody whose tokens are in this step already can be hit, as they come before it: no budget has to be refunded.
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
        self._waiting.put_back([request])

    def _admit_waiting(self, scheduled: list[ScheduledRequest], budget: int) -> None:
        """Phase 2, in the queue's order: if the first in it does not fit, nobody overtakes it."""
        while self._waiting and budget > 0 and len(self._running) < self.max_num_seqs:
            request = self._waiting.first()
            cached_blocks = self.kv.find_cached_prefix(request)
            num_cached_tokens = len(cached_blocks) * self.kv.block_size
            num_new_tokens = min(request.num_tokens - num_cached_tokens, budget)
            if not self.kv.allocate(request, num_new_tokens, cached_blocks):
                break
            insort(self._running, self._waiting.pop(), key=_priority)  # behind its equals
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_cached_tokens
            if request.num_preemptions == 0:
                request.num_cached_tokens = num_cached_tokens
            scheduled.append(_scheduled(request, num_new_tokens))
            budget -= num_new_tokens

    def _take_in(self, request: Request, item: ScheduledRequest, result: RunnerResult) -> list[RequestNews]:
        """The news of one request, if there are any: a part of a prompt is none."""
        if result.error is not None:
            # Nobody looks at the KV of a part of a prompt: what went wrong may have begun in an earlier step.
            self.kv.forget(request)
            self.finish(request, FinishReason.ERROR)
            return [RequestNews(request, error=result.error)]
        request.num_computed_tokens = item.end
        self.kv.cache_computed_blocks(request)
        token_ids = self._append_tokens(request, result.token_ids)
        if not token_ids and not result.prompt_logprobs and request.status is not RequestStatus.FINISHED:
            return []
        return [
            RequestNews(
                request,
                token_ids,
                logprobs=result.logprobs[: len(token_ids)],
                prompt_start=item.start + 1 if result.prompt_logprobs else 0,
                prompt_logprobs=result.prompt_logprobs,
            )
        ]

    def _append_tokens(self, request: Request, sampled: Sequence[int]) -> tuple[int, ...]:
        """Append one by one until one ends the request. Returns those appended."""
        if sampled and request.sampling.max_tokens == 0:  # only the prompt was wanted
            self.finish(request, FinishReason.LENGTH)
            return ()
        for count, token_id in enumerate(sampled, start=1):
            can_stop = request.num_output_tokens >= request.sampling.min_tokens
            request.token_ids.append(token_id)
            self._finish_if_over(request, token_id, can_stop)
            if request.status is RequestStatus.FINISHED:
                return tuple(sampled[:count])
        return tuple(sampled)

    def _finish_if_over(self, request: Request, token_id: int, can_stop: bool) -> None:
        sampling = request.sampling
        if can_stop and token_id in request.eos_token_ids and not sampling.ignore_eos:
            self.finish(request, FinishReason.STOP)
        elif can_stop and token_id in sampling.stop_token_ids:
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
            self._waiting.put_back(self._forks.pop(request, ()))
        elif self._waiting.replace(request, self._forks.get(request, ())):
            self._forks.pop(request, None)
        else:
            self._remove_waiting_fork(request)
        self.kv.free(request)

    def _remove_waiting_fork(self, fork: Request) -> None:
        assert fork.parent is not None, "who neither runs nor queues waits for its parent"
        forks = self._forks[fork.parent]
        forks.remove(fork)
        if not forks:
            del self._forks[fork.parent]


def _priority(request: Request) -> int:
    return request.priority


def _scheduled(request: Request, num_new_tokens: int) -> ScheduledRequest:
    start = request.num_computed_tokens
    end = start + num_new_tokens
    samples = end == request.num_tokens
    wants_prompt_logprobs = request.sampling.prompt_logprobs is not None and request.num_output_tokens == 0
    return ScheduledRequest(
        request_id=request.request_id,
        token_ids=request.token_ids,
        start=start,
        end=end,
        block_ids=request.block_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        samples=samples,
        banned_ids=_banned_ids(request) if samples else frozenset(),
        wants_prompt_logprobs=wants_prompt_logprobs,
    )


def _banned_ids(request: Request) -> frozenset[int]:
    """The tokens that would end the request, while it has fewer than `min_tokens`."""
    sampling = request.sampling
    if request.num_output_tokens >= sampling.min_tokens:
        return frozenset()
    eos_token_ids = frozenset() if sampling.ignore_eos else request.eos_token_ids
    return eos_token_ids.union(sampling.stop_token_ids)
