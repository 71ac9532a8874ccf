"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from miniserve.api.schemas.common import (
    FinishReasonName,
    LogprobCount,
    RequestModel,
    ResponseModel,
    SamplingFields,
    UsageInfo,
)
from miniserve.errors import InvalidParameterError
from miniserve.sampling_params import MAX_TOKENS

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]}


class ChatMessage(RequestModel):
    """One turn. Fields besides these (name, tool_calls, reasoning_content, ...) reach the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    # The chat template's own checks name the part that is wrong.
    content: Annotated[Any, WithJsonSchema(_CONTENT_SCHEMA)] = Field(
        None, description="text, or a list of text parts; null is empty"
    )


class ChatCompletionRequest(SamplingFields):
    """The body of a chat completion."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True, description="the conversation so far")
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS, description="default: the rest of the context")
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS, description="wins over max_tokens")
    logprobs: bool | None = Field(None, description="report each output token's logprob")
    top_logprobs: LogprobCount | None = Field(None, description="and of so many most probable ones; needs logprobs")
    add_special_tokens: bool | None = Field(
        None, description="let the tokenizer add BOS and the like to the rendered template; default false"
    )

    @property
    def num_logprobs(self) -> int | None:
        """For `SamplingParams.logprobs`.

        Raises:
            InvalidParameterError: top_logprobs without logprobs.
        """
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameterError("top_logprobs needs logprobs; set it to true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def output_limit(self) -> int | None:
        """For `SamplingParams.max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def output_limit_name(self) -> str:
        """The field that `output_limit` comes from."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def message_dicts(self) -> list[dict[str, Any]]:
        """The messages as they were sent."""
        return [message.model_dump(exclude_unset=True) for message in self.messages]


class TopLogprob(ResponseModel):
    """A candidate for a token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A token of the answer. `bytes` are exact, also of half a character."""

    top_logprobs: list[TopLogprob]


class ChatLogprobsInfo(ResponseModel):
    """One entry a token."""

    content: list[ChatTokenLogprob]


class AssistantMessage(ResponseModel):
    """The answer's message."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(ResponseModel):
    """One of the `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobsInfo | None
    finish_reason: FinishReasonName
    stop_reason: int | str | None = Field(None, description="the stop token or string that ended it")


class ChatCompletion(ResponseModel):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo


class Delta(ResponseModel):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(ResponseModel):
    """What a chunk adds to a choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobsInfo | None
    finish_reason: FinishReasonName | None


class ChatCompletionChunk(ResponseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | None = None
