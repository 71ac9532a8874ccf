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
class Usage:
    """Token counts of one request. `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from the submission of a request: to its first token, and to its end."""

    first_token: float
    total: float


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one step added to one request.

    `text` may be empty (half a character, text held back that may become a stop string) and may hold more
    than `token_ids` stand for (what was held back before). `usage` and `timing` are set with
    `finish_reason`, on the last output of a request.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended the request
    usage: Usage | None = None
    timing: Timing | None = None


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
