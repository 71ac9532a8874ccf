"""From new token ids to text: detokenise, match stop strings, time and count. One state per request."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from miniserve.core.request import Request
from miniserve.outputs import EngineOutput, FinishReason, Timing, Usage
from miniserve.text.detokenizer import IncrementalDetokenizer
from miniserve.text.stop import StopMatcher
from miniserve.text.tokenizer import Tokenizer


@dataclass(slots=True)
class RequestText:
    """The text side of one request."""

    detokenizer: IncrementalDetokenizer
    stop_matcher: StopMatcher
    arrival: float = field(default_factory=time.perf_counter)
    first_token: float | None = None

    def push(self, token_ids: Iterable[int]) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that ended it."""
        return self.stop_matcher.push(self.detokenizer.push(token_ids))

    def flush(self) -> tuple[str, str | None]:
        """What is left at the end: half a character, and text held back."""
        text, stop = self.stop_matcher.push(self.detokenizer.flush())
        return (text, stop) if stop is not None else (text + self.stop_matcher.flush(), None)


class OutputProcessor:
    """Turns the scheduler's news into outputs. Forgets a request with its last output."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[str, RequestText] = {}

    def add(self, request: Request) -> None:
        """Start the clock of a request, before its first step."""
        self._texts[request.request_id] = RequestText(
            IncrementalDetokenizer(self._tokenizer), StopMatcher(request.sampling.stop)
        )

    def process(self, request: Request, token_ids: tuple[int, ...]) -> tuple[EngineOutput, str | None]:
        """The output of `request`'s new tokens, and the stop string they complete, if they do.

        A stop string ends the output with reason STOP here; ending the request itself is the caller's.
        """
        state = self._texts[request.request_id]
        if state.first_token is None:
            state.first_token = time.perf_counter()
        # The token that ended the request by its id (EOS, a stop token) is counted, and not shown.
        ended_by_token = request.finish_reason is FinishReason.STOP
        text, stop = state.push(token_ids[:-1] if ended_by_token else token_ids)
        if stop is None and request.finish_reason is not None:
            rest, stop = state.flush()
            text += rest
        if stop is not None:
            return self._last(request, token_ids, text, FinishReason.STOP, stop), stop
        if request.finish_reason is not None:
            return self._last(request, token_ids, text, request.finish_reason, request.stop_reason), None
        return EngineOutput(request.request_id, token_ids, text), None

    def abort(self, request: Request) -> EngineOutput:
        """The last output of a request that was aborted: what was held back is dropped."""
        return self._last(request, (), "", FinishReason.ABORT, None)

    def _last(
        self,
        request: Request,
        token_ids: tuple[int, ...],
        text: str,
        reason: FinishReason,
        stop_reason: int | str | None,
    ) -> EngineOutput:
        state = self._texts.pop(request.request_id)
        now = time.perf_counter()
        usage = Usage(request.num_prompt_tokens, request.num_output_tokens, request.num_cached_tokens)
        timing = Timing((state.first_token or now) - state.arrival, now - state.arrival)
        return EngineOutput(request.request_id, token_ids, text, reason, stop_reason, usage, timing)
