"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from miniserve.api.schemas.common import (
    PROMPT_LOGPROBS_DESCRIPTION,
    TOKEN_IDS_DESCRIPTION,
    LogprobCount,
    PromptLogprobsInfo,
    RequestModel,
    ResponseModel,
    SamplingFields,
    UsageInfo,
)
from miniserve.engine.openai_fields import parse_reasoning, parse_tool_choice, parse_tools
from miniserve.engine.options import REASONING_EFFORTS, TOOL_CHOICES, ChatOptions
from miniserve.errors import InvalidParameterError, shown
from miniserve.sampling_params import MAX_TOKENS
from miniserve.text.parsers.base import MAX_TOOLS

ChatFinishReasonName = Literal["stop", "length", "tool_calls"]
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]}
_TOOL_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
                "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_TOOLS_SCHEMA = {"anyOf": [{"type": "array", "items": _TOOL_SCHEMA, "maxItems": MAX_TOOLS}, {"type": "null"}]}
_NAMED_FUNCTION = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_EFFORT_SCHEMA = {"anyOf": [{"enum": [*REASONING_EFFORTS]}, {"type": "null"}]}
_REASONING_SCHEMA = {"anyOf": [{"type": "object", "properties": {"effort": _EFFORT_SCHEMA}}, {"type": "null"}]}
_TOOL_CHOICE_SCHEMA = {"anyOf": [{"enum": [*TOOL_CHOICES]}, _NAMED_FUNCTION, {"type": "null"}]}

EffortField = Annotated[str | None, WithJsonSchema(_EFFORT_SCHEMA)]
ReasoningField = Annotated[Any, WithJsonSchema(_REASONING_SCHEMA)]  # checked by `parse_reasoning`
ToolsField = Annotated[Any, WithJsonSchema(_TOOLS_SCHEMA)]  # by `parse_tools`
ToolChoiceField = Annotated[Any, WithJsonSchema(_TOOL_CHOICE_SCHEMA)]  # and by `parse_tool_choice`
TEMPLATE_KWARGS_DESCRIPTION = "more variables for the chat template, such as enable_thinking"
REASONING_DESCRIPTION = "with effort only: the same as reasoning_effort"
TOOLS_DESCRIPTION = f"functions that the model may call; at most {MAX_TOOLS}"
CONTINUE_DESCRIPTION = "the answer goes on where the last message, the assistant's, ends"


class ChatMessage(RequestModel):
    """One turn. Fields besides these (name, tool_calls, reasoning_content, ...) reach the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    # The chat template's own checks name the part that is wrong.
    content: Annotated[Any, WithJsonSchema(_CONTENT_SCHEMA)] = Field(
        None, description="text, or a list of text parts; of the assistant and of tools, null is empty"
    )


class ChatCompletionRequest(SamplingFields):
    """The body of a chat completion."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True, description="the conversation so far")
    tools: ToolsField = Field(None, description=TOOLS_DESCRIPTION)
    tool_choice: ToolChoiceField = Field(
        None, description="none, auto, required, or the one function that must be called; default auto"
    )
    parallel_tool_calls: bool | None = Field(None, description="allow several calls in one answer; default true")
    reasoning_effort: EffortField = Field(
        None, description="for the chat template, if it knows efforts; none asks for an answer without reasoning"
    )
    reasoning: ReasoningField = Field(None, description=REASONING_DESCRIPTION)
    include_reasoning: bool | None = Field(
        None, description="show the reasoning; default true. It is counted all the same, and logprobs and ids have it"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=TEMPLATE_KWARGS_DESCRIPTION)
    add_generation_prompt: bool | None = Field(
        None,
        description="end the prompt with the header of the assistant's turn; default true, unless the last message "
        "is continued",
    )
    continue_final_message: bool | None = Field(None, description=CONTINUE_DESCRIPTION)
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

    def chat_options(self) -> ChatOptions:
        """How the conversation becomes a prompt, and what is looked for in the answer.

        Raises:
            InvalidParameterError, UnsupportedParameterError: the tools or the choice among them have no known shape.
        """
        tool_choice, tool_name = parse_tool_choice(self.tool_choice)
        return ChatOptions(
            tools=parse_tools(self.tools),
            tool_choice=tool_choice,
            tool_name=tool_name,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            add_generation_prompt=wants_generation_prompt(self.add_generation_prompt, self.continue_final_message),
            continue_final_message=self.continue_final_message or False,
            template_kwargs=self.chat_template_kwargs or {},
            reasoning_effort=wanted_effort(self.reasoning_effort, self.reasoning),
            add_special_tokens=self.add_special_tokens or False,
        )

    def sent_name(self, param: str | None) -> str | None:
        """The field that was sent, for what the engine knows by one name only."""
        if param == "reasoning_effort" and self.reasoning_effort is None:
            return "reasoning.effort"
        return self.output_limit_name if param == "max_tokens" else param

    def message_dicts(self) -> list[dict[str, Any]]:
        """The messages as they were sent."""
        return [message.model_dump(exclude_unset=True) for message in self.messages]


def wants_generation_prompt(asked: bool | None, continue_final_message: bool | None) -> bool:
    """Whether the prompt ends with the header of the assistant's turn; by default, unless a message is continued."""
    return not continue_final_message if asked is None else asked


def wanted_effort(reasoning_effort: str | None, reasoning: Any) -> str | None:
    """How much to reason, whichever field says it.

    Raises:
        InvalidParameterError, UnsupportedParameterError: `reasoning` has no known shape, or both differ.
    """
    effort = parse_reasoning(reasoning)
    if None not in (effort, reasoning_effort) and effort != reasoning_effort:
        raise InvalidParameterError(
            f"reasoning.effort is {effort!r}, but reasoning_effort is {shown(reasoning_effort)}: they contradict each "
            "other; leave out one of them",
            param="reasoning",
        )
    return reasoning_effort if effort is None else effort


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


class CalledFunction(ResponseModel):
    """What to call."""

    name: str
    arguments: str = Field(description="a JSON object, as the model wrote it; cut off where the answer is")


class MessageToolCall(ResponseModel):
    """One call of a function."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(ResponseModel):
    """The answer's message."""

    role: Literal["assistant"]
    content: str | None = Field(description="null where the answer is tool calls only")
    refusal: None = None
    tool_calls: list[MessageToolCall] | None = Field(None, description="absent where there are none")
    reasoning_content: str | None = Field(None, description="what the model thought first; absent where it did not")
    reasoning: str | None = Field(None, description="the same under its other name")


class ChatChoice(ResponseModel):
    """One of the `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobsInfo | None
    finish_reason: ChatFinishReasonName
    stop_reason: int | str | None = Field(None, description="the stop token or string that ended it")
    token_ids: list[int] | None = Field(None, description=TOKEN_IDS_DESCRIPTION)


class ChatCompletion(ResponseModel):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] | None = Field(None, description=TOKEN_IDS_DESCRIPTION)
    prompt_logprobs: PromptLogprobsInfo | None = Field(None, description=PROMPT_LOGPROBS_DESCRIPTION)


class FunctionDelta(ResponseModel):
    """The name, with the first part of a call; then more and more of the arguments."""

    name: str | None = None
    arguments: str


class ToolCallDelta(ResponseModel):
    """What a chunk adds to a call. Only the first part has an id, a type and the name."""

    index: int = Field(description="counts the calls of the message from 0")
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(ResponseModel):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatChunkChoice(ResponseModel):
    """What a chunk adds to a choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobsInfo | None
    finish_reason: ChatFinishReasonName | None
    token_ids: list[int] | None = Field(None, description=TOKEN_IDS_DESCRIPTION)


class ChatCompletionChunk(ResponseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | None = Field(None, description="with return_token_ids, in the first chunk")
