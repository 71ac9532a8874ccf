"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from pydantic import Field

from miniserve.api.schemas.chat import ChatMessage
from miniserve.api.schemas.common import MODEL_DESCRIPTION, RequestModel, ResponseModel


class TokenizeRequest(RequestModel):
    """A text or a conversation: one of both."""

    model: str | None = Field(None, description=MODEL_DESCRIPTION)
    prompt: str | None = Field(None, description="a text")
    messages: list[ChatMessage] | None = Field(
        None, min_length=1, fail_fast=True, description="a conversation, for the chat template"
    )
    add_special_tokens: bool | None = Field(
        None, description="add BOS and the like; default true for a text, false for a conversation"
    )
    add_generation_prompt: bool | None = Field(
        None, description="end a conversation with the header of the assistant's turn; default true"
    )
    return_token_strs: bool | None = Field(None, description="the tokens as text too")


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
