"""From what the scheduler took in to what a client gets: text, logprobs, counts, times; and why a request ends.

One state per request, from `add` to its last output. Does not end requests: an output's finish reason says that the
text or the grammar did. What the tokens say is `output_text`'s.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from miniserve.core.request import Request
from miniserve.core.schedule import SchedulerOutput
from miniserve.core.scheduler import RequestNews
from miniserve.engine.output_text import OutputText
from miniserve.outputs import EngineOutput, FinishReason, Timing, TokenLogprobs, Usage
from miniserve.structured.compiler import GrammarError
from miniserve.structured.masks import MaskQuery
from miniserve.text.tokenizer import Tokenizer

# What users are told, before what the grammar says.
LEFT_GRAMMAR = "the answer does not keep to its structure"


@dataclass(frozen=True, slots=True)
class Processed:
    """One output, and the seconds since the request's previous tokens (None: there are none before, or now)."""

    output: EngineOutput
    gap: float | None = None


@dataclass(slots=True)
class RequestState:
    """What is known of a request beside the scheduler's view. Times are those of `time.perf_counter`."""

    text: OutputText
    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    # The first prompt token has none: nothing precedes it.
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    prompt_logprobs_given: bool = False

    def timing(self) -> Timing:
        """Seconds from the arrival until each event, up to now."""
        queue = None if self.first_scheduled is None else self.first_scheduled - self.arrival
        first_token = None if self.first_token is None else self.first_token - self.arrival
        return Timing(queue, first_token, time.perf_counter() - self.arrival)

    def take_tokens(self) -> float | None:
        """Note that tokens came now; returns the seconds since the previous ones."""
        now = time.perf_counter()
        gap = None if self.last_token is None else now - self.last_token
        if self.first_token is None:
            self.first_token = now
        self.last_token = now
        return gap

    def take_prompt_logprobs(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Note those from position `start` on. After a preemption they come again; the first ones stay."""
        known = len(self.prompt_logprobs) - start
        assert known >= 0, "prompt logprobs come without gaps"
        self.prompt_logprobs += entries[known:]


class OutputProcessor:
    """Turns the scheduler's news into outputs. Forgets a request with its last output."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, RequestState] = {}

    def add(self, *requests: Request, arrival: float | None = None) -> None:
        """Know requests before their first step: all, or none if that fails.

        Args:
            arrival: when they were submitted (`perf_counter`), if not now.
        """
        arrival = time.perf_counter() if arrival is None else arrival
        texts = [OutputText(self._tokenizer, request.sampling, request.output_format) for request in requests]
        for request, text in zip(requests, texts, strict=True):
            self._states[request.request_id] = RequestState(text, arrival)

    def scheduled(self, step: SchedulerOutput) -> None:
        """End the queue time of those who are computed for the first time."""
        now = time.perf_counter()
        for item in step.scheduled:
            state = self._states[item.request_id]
            if state.first_scheduled is None:
                state.first_scheduled = now

    def constrained(self, step: SchedulerOutput) -> list[MaskQuery]:
        """Whose next token has to keep to a grammar."""
        return [
            query
            for item in step.scheduled
            if item.samples and (query := self._states[item.request_id].text.mask_query(item.request_id)) is not None
        ]

    def process(self, news: RequestNews) -> Processed | None:
        """The output that the news make; None while a prompt is only partly computed.

        A stop string or a complete grammar ends the output with reason STOP here, an answer that leaves its grammar
        with an error; ending the request itself is the caller's.
        """
        request = news.request
        state = self._states[request.request_id]
        if news.prompt_logprobs and not state.prompt_logprobs_given:
            state.take_prompt_logprobs(news.prompt_start, news.prompt_logprobs)
        if news.error is not None:
            return Processed(self.fail(request, news.error))
        if not news.token_ids and request.finish_reason is None:
            return None
        gap = state.take_tokens() if news.token_ids else None
        try:
            reasoning, text, stop = self._text(state, request, news.token_ids)
        except GrammarError as error:
            return Processed(self.fail(request, f"{LEFT_GRAMMAR}: {error}"), gap)
        ended_here = stop is not None or state.text.is_complete
        reason = FinishReason.STOP if ended_here else request.finish_reason
        output = EngineOutput(
            request_id=request.request_id,
            token_ids=news.token_ids,
            text=text,
            usage=_usage(state, request),
            finish_reason=reason,
            stop_reason=self._stop_reason(request) if stop is None else stop,
            logprobs=news.logprobs,
            prompt_logprobs=_prompt_logprobs(state, request),
            timing=state.timing(),
            reasoning=reasoning,
        )
        if reason is not None:
            del self._states[request.request_id]
        return Processed(output, gap)

    def abort(self, request: Request) -> EngineOutput:
        """The last output of a request that was aborted: what was held back is dropped."""
        return self._ended(request, FinishReason.ABORT, None)

    def fail(self, request: Request, error: str) -> EngineOutput:
        """The last output of a request that went wrong; `error` is what its client is told."""
        return self._ended(request, FinishReason.ERROR, error)

    def _ended(self, request: Request, reason: FinishReason, error: str | None) -> EngineOutput:
        state = self._states.pop(request.request_id)
        return EngineOutput(
            request_id=request.request_id,
            token_ids=(),
            text="",
            usage=_usage(state, request),
            finish_reason=reason,
            timing=state.timing(),
            error=error,
        )

    def _text(self, state: RequestState, request: Request, token_ids: tuple[int, ...]) -> tuple[str, str, str | None]:
        """What the new tokens say, as `OutputText.push`; nothing is held back if they are the last."""
        shown, spelling = self._shown(request, token_ids)
        may_stop = request.num_output_tokens >= request.sampling.min_tokens
        reasoning, text, stop = state.text.push(
            shown,
            may_stop=may_stop,
            is_last=request.finish_reason is not None,
            is_cut=request.finish_reason is FinishReason.LENGTH,
        )
        if not spelling or stop is not None:
            return reasoning, text, stop
        return (reasoning + spelling, text, None) if state.text.is_reasoning else (reasoning, text + spelling, None)

    def _shown(self, request: Request, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """The tokens that leave text, and the text of the stop token if that is wanted.

        The token that ended the request by its id (end-of-sequence, or a stop token) is counted, and is no part of what
        the model said. A stop token that was asked for is shown whatever `skip_special_tokens` says.
        """
        if request.finish_reason is not FinishReason.STOP:
            return token_ids, ""
        if request.stop_reason is None or not request.sampling.include_stop_str_in_output:
            return token_ids[:-1], ""
        return token_ids[:-1], self._tokenizer.decode(token_ids[-1:], skip_special_tokens=False)

    def _stop_reason(self, request: Request) -> int | str | None:
        """The stop token or, where a stop string spells that token, the string that the client sent."""
        reason = request.stop_reason
        if isinstance(reason, int):
            for stop in request.sampling.stop:
                if self._tokenizer.special_id(stop) == reason:
                    return stop
        return reason


def _usage(state: RequestState, request: Request) -> Usage:
    num_reasoning_tokens = state.text.num_reasoning_tokens
    return Usage(request.num_prompt_tokens, request.num_output_tokens, request.num_cached_tokens, num_reasoning_tokens)


def _prompt_logprobs(state: RequestState, request: Request) -> tuple[TokenLogprobs | None, ...] | None:
    if request.sampling.prompt_logprobs is None or state.prompt_logprobs_given:
        return None
    assert len(state.prompt_logprobs) == request.num_prompt_tokens, "one entry per prompt token"
    state.prompt_logprobs_given = True
    return tuple(state.prompt_logprobs)
