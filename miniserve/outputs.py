"""What comes out of the engine: per step (`EngineOutput`) and per finished request (`RequestOutput`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


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
        rank: 1 where no token is more probable, 2 where one is, and so on.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1


@dataclass(frozen=True, slots=True)
class Thinking:
    """That a model reasons before it answers, and how it marks that in its text.

    Attributes:
        start, end: the tags around the reasoning, such as "<think>" and "</think>".
        inside: the prompt has opened the reasoning already: the output begins in it.
        begun: the beginning of a tag with which the prompt ends: of the start tag, or inside of the end tag.
    """

    start: str
    end: str
    inside: bool = False
    begun: str = ""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What the output of one request is made of, where it is more than text. Settled before the request starts.

    Attributes:
        thinking: None where no reasoning is looked for.
        shown_ids: special tokens that leave text all the same, because they mark the parts of an answer.
        grammar: a `structured.Grammar` that the answer keeps to, once any reasoning has ended; None for a free answer.
    """

    thinking: Thinking | None = None
    shown_ids: frozenset[int] = frozenset()
    grammar: Any = None


PLAIN_TEXT = OutputFormat()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called. `arguments`: a JSON object as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.

    `cached_tokens` of the prompt came from the prefix cache; `reasoning_tokens` of the completion are reasoning, its
    tags included.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0


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
        text: of the answer proper, without reasoning.
        usage: the counts so far, this output included.
        logprobs: one entry per token of `token_ids` where they were asked for, else empty.
        prompt_logprobs: one entry per prompt token (None for the first, which nothing precedes), once per request
            that asked for them, with its first output.
        stop_reason: the stop token or stop string that ended the request; None for an end-of-sequence token.
        timing: the times so far, this output included.
        error: what went wrong, with `FinishReason.ERROR`.
        reasoning: new text of the reasoning, which always comes before any of the answer.
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
    reasoning: str = ""

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
            reasoning=self.reasoning + later.reasoning,
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request of the offline twin. `text` and `reasoning` == the joined ones of its stream.

    Attributes:
        tool_calls: the calls that the answer makes; `text` is without them then.
    """

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
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
