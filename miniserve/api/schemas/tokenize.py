"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from miniserve.api.schemas.chat import (
    CONTINUE_DESCRIPTION,
    REASONING_DESCRIPTION,
    TEMPLATE_KWARGS_DESCRIPTION,
    TOOLS_DESCRIPTION,
    ChatMessage,
    EffortField,
    ReasoningField,
    ToolChoiceField,
    ToolsField,
    wanted_effort,
    wants_generation_prompt,
)
from miniserve.api.schemas.common import MODEL_DESCRIPTION, RequestModel, ResponseModel
from miniserve.engine.openai_fields import parse_tool_choice, parse_tools
from miniserve.engine.options import ChatOptions
from miniserve.errors import InvalidParameterError

_OF_CONVERSATIONS = (
    *("tools", "tool_choice", "reasoning_effort", "reasoning", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)


class TokenizeRequest(RequestModel):
    """A text or a conversation: one of both."""

    model: str | None = Field(None, description=MODEL_DESCRIPTION)
    prompt: str | None = Field(None, description="a text, of at most 2,097,152 characters")
    messages: list[ChatMessage] | None = Field(
        None, min_length=1, fail_fast=True, description="a conversation, for the chat template"
    )
    add_special_tokens: bool | None = Field(
        None, description="add BOS and the like; default true for a text, false for a conversation"
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="end a conversation with the header of the assistant's turn; default true, unless the last "
        "message is continued",
    )
    continue_final_message: bool | None = Field(None, description=CONTINUE_DESCRIPTION)
    tools: ToolsField = Field(None, description=TOOLS_DESCRIPTION)
    tool_choice: ToolChoiceField = Field(None, description="with none, the model is not told of the tools")
    reasoning_effort: EffortField = Field(None, description="for the chat template, if it knows efforts")
    reasoning: ReasoningField = Field(None, description=REASONING_DESCRIPTION)
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=TEMPLATE_KWARGS_DESCRIPTION)
    return_token_strs: bool | None = Field(None, description="the tokens as text too")

    def check_kind(self) -> None:
        """Raises InvalidParameterError unless it is either a text or a conversation, with fields of that kind only."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidParameterError("send either prompt or messages", param="prompt")
        for name in _OF_CONVERSATIONS if self.messages is None else ():
            if getattr(self, name):
                raise InvalidParameterError(f"{name} goes with messages, not with prompt; leave it out", param=name)

    def chat_options(self) -> ChatOptions:
        """How the conversation becomes a prompt.

        Raises:
            InvalidParameterError, UnsupportedParameterError: the tools or the choice among them have no known shape,
                or what is asked for excludes each other.
        """
        tool_choice, tool_name = parse_tool_choice(self.tool_choice)
        return ChatOptions(
            tools=parse_tools(self.tools),
            tool_choice=tool_choice,
            tool_name=tool_name,
            reasoning_effort=wanted_effort(self.reasoning_effort, self.reasoning),
            add_generation_prompt=wants_generation_prompt(self.add_generation_prompt, self.continue_final_message),
            continue_final_message=self.continue_final_message or False,
            template_kwargs=self.chat_template_kwargs or {},
            add_special_tokens=self.add_special_tokens or False,
        )


class TokenizeResponse(ResponseModel):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    """Token ids."""

    model: str | None = Field(None, description=MODEL_DESCRIPTION)
    tokens: list[int] = Field(fail_fast=True, description="ids of the vocabulary")


class DetokenizeResponse(ResponseModel):
    """Their text, special tokens spelled out; bytes that are not UTF-8 become U+FFFD."""

    prompt: str
