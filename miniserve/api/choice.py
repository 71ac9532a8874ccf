"""One choice of a call: what has come of it, and what waits to be sent. Does not know how an answer is spelled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from miniserve.api.logprobs import Entry, LogprobsFormat
from miniserve.core.request import Request
from miniserve.engine.answer import AnswerDelta, ReasoningDelta, deltas_of
from miniserve.errors import InvalidParameterError
from miniserve.outputs import EngineOutput, FinishReason
from miniserve.text.parsers.base import CallStart, TextDelta, ToolParser

TOOL_CALLS = "tool_calls"  # the finish reason of an answer of whole calls; to the engine, it has stopped
MAX_PROMPT_LOGPROBS = 500_000  # in an answer


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt as part of a choice's answer. `num_top`: how many candidates its logprobs show."""

    text: str
    num_top: int


@dataclass(frozen=True, slots=True)
class Tools:
    """What finds the tool calls of one choice, and names them."""

    parser: ToolParser
    new_call_id: Callable[[], str]


@dataclass(slots=True, eq=False)
class Choice:
    """One answer.

    Attributes:
        parent: the choice that computes the prompt for this one; None where this one does.
        tools: None where no calls are looked for.
        returns_token_ids: whether the client wants to see the ids too.
        entries, token_ids: logprobs and ids of tokens that no chunk has carried yet, where they are wanted.
        call_ids: of the tool calls so far.
    """

    index: int
    request: Request
    parent: Choice | None
    logprobs: LogprobsFormat | None
    echo: Echo | None = None
    tools: Tools | None = None
    shows_reasoning: bool = True
    returns_token_ids: bool = False
    entries: list[Entry] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_cached_tokens: int = 0
    started: bool = False
    _prompt_entries: list[Entry] = field(default_factory=list)
    _finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt, as the engine has it."""
        return self.request.token_ids[: self.request.num_prompt_tokens]

    @property
    def prompt_entries(self) -> list[Entry]:
        """The prompt's logprobs, once the first output has come, where they were asked for."""
        return (self.parent or self)._prompt_entries

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, in the API's words; None while it goes on."""
        broke_off = self.tools is not None and self.tools.parser.broke_off
        if self._finish_reason is FinishReason.STOP and self.call_ids and not broke_off:
            return TOOL_CALLS
        return None if self._finish_reason is None else self._finish_reason.value

    def take(self, output: EngineOutput) -> list[AnswerDelta]:
        """Take in what came; returns what it adds to the answer."""
        if output.prompt_logprobs is not None:
            self._prompt_entries = list(zip(self.prompt_token_ids, output.prompt_logprobs, strict=True))
        deltas = deltas_of(output, None if self.tools is None else self.tools.parser)
        if not self.shows_reasoning:
            deltas = [delta for delta in deltas if not isinstance(delta, ReasoningDelta)]
        if self.tools is not None:
            self.call_ids += [self.tools.new_call_id() for delta in deltas if isinstance(delta, CallStart)]
        if not self.started:
            self.started = True
            if self.echo is not None:
                deltas.insert(0, TextDelta(self.echo.text))
                self.entries += [_with_top(entry, self.echo.num_top) for entry in self.prompt_entries]
        self.entries += [(entry.token_id, entry) for entry in output.logprobs]
        if self.returns_token_ids:
            self.token_ids += output.token_ids
        self.num_tokens = output.usage.completion_tokens
        self.num_reasoning_tokens = output.usage.reasoning_tokens
        self.num_cached_tokens = output.usage.cached_tokens
        self._finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        return deltas

    def take_logprobs(self) -> dict[str, Any] | None:
        """The logprobs that no chunk has carried yet; None where none were asked for."""
        if self.logprobs is None:
            return None
        entries, self.entries = self.entries, []
        return self.logprobs.format(entries)

    def take_token_ids(self) -> list[int]:
        """The ids that no chunk has carried yet."""
        token_ids, self.token_ids = self.token_ids, []
        return token_ids


def _with_top(entry: Entry, num_top: int) -> Entry:
    token_id, logprobs = entry
    return token_id, None if logprobs is None else replace(logprobs, top=logprobs.top[:num_top])


def check_prompt_logprobs(choices: Sequence[Choice], num_top: int | None, *, param: str) -> None:
    """Refuse an answer that is huge though the request is small: each choice repeats its prompt's logprobs.

    Args:
        num_top: how many candidates each token of a prompt has beside itself; None where they are not asked for.
        param: the field that asks for them.

    Raises:
        InvalidParameterError: there are more than `MAX_PROMPT_LOGPROBS` of them.
    """
    if num_top is None:
        return
    number = sum(choice.request.num_prompt_tokens for choice in choices) * (num_top + 1)
    if number > MAX_PROMPT_LOGPROBS:
        raise InvalidParameterError(
            f"the answer would have {number} logprobs of prompts, {num_top + 1} for each token of each choice; at most "
            f"{MAX_PROMPT_LOGPROBS} are given: ask for fewer candidates, choices or prompts",
            param=param,
        )
