"""What comes out of the engine: per step (`EngineOutput`) and per finished request (`RequestOutput`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request ended, in OpenAI's words where it has them."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, the context or the KV cache is used up
    ABORT = "abort"  # the client went away
    ERROR = "error"  # our fault


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable a token was at its place: natural logarithms, before penalties and temperature.

    Attributes:
        top: (token id, logprob) of the most probable tokens there, most probable first; as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from the submission of a request: to its first scheduling, to its first token, and to this output.

    `queue` and `first_token` are None for a request that did not get that far.
    """

    queue: float | None
    first_token: float | None
    total: float


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one step (or, merged, several) added to one request.

    `text` may be empty (half a character, text held back that may become a stop string) and may hold more
    than `token_ids` stand for (what was held back before).

    Attributes:
        usage: the counts so far, this output included.
        logprobs: one entry per token of `token_ids` where they were asked for, else empty.
        prompt_logprobs: one entry per prompt token (None for the first, which nothing precedes), once per request
            that asked for them, with its first output.
        stop_reason: the stop token or stop string that ended the request; None for an end-of-sequence token.
        timing: the times so far, this output included.
        error: what went wrong, with `FinishReason.ERROR`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    usage: Usage
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    timing: Timing | None = None
    error: str | None = None

    def merge(self, later: EngineOutput) -> EngineOutput:
        """This output and the next of the same request as one: for a reader who is slower than the engine."""
        assert later.request_id == self.request_id and self.finish_reason is None
        return EngineOutput(
            request_id=self.request_id,
            token_ids=self.token_ids + later.token_ids,
            text=self.text + later.text,
            usage=later.usage,
            finish_reason=later.finish_reason,
            stop_reason=later.stop_reason,
            logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=self.prompt_logprobs if later.prompt_logprobs is None else later.prompt_logprobs,
            timing=later.timing,
            error=later.error,
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request of the offline twin. `text` == the joined texts of its stream."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None
    usage: Usage
    timing: Timing
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
