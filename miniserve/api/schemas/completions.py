"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from miniserve.api.schemas.common import (
    MAX_CHOICES,
    MAX_PROMPTS,
    PROMPT_LOGPROBS_DESCRIPTION,
    TOKEN_IDS_DESCRIPTION,
    FinishReasonName,
    LogprobCount,
    PromptLogprobsInfo,
    ResponseModel,
    SamplingFields,
    UsageInfo,
)
from miniserve.errors import InvalidParameterError, UnsupportedParameterError
from miniserve.sampling_params import MAX_TOKENS

DEFAULT_MAX_TOKENS = 16  # OpenAI's

_TOKENS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
        _TOKENS_SCHEMA,
        {"type": "array", "items": _TOKENS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}


class CompletionRequest(SamplingFields):
    """The body of a completion."""

    # Checked by `prompts`: a union of four shapes has no readable errors.
    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)] = Field(
        description=f"a text, a list of token ids, or a list of up to {MAX_PROMPTS} of either"
    )
    max_tokens: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description=f"default {DEFAULT_MAX_TOKENS}; 0 only computes the prompt"
    )
    logprobs: LogprobCount | None = Field(
        None, description="report each token's logprob, and of so many most probable ones"
    )
    echo: bool | None = Field(None, description="begin with the prompt; with logprobs, its logprobs too")
    best_of: int | None = Field(None, ge=1, description="only 1, or the same as n")
    add_special_tokens: bool | None = Field(
        None, description="let the tokenizer add BOS and the like to a text prompt; default true"
    )

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or many.

        Raises:
            InvalidParameterError: it has no known shape, or there are too many.
        """
        prompt = self.prompt
        if isinstance(prompt, str) or _is_token_ids(prompt):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise _wrong_prompt("prompt must be a text, an array of token ids, or a non-empty array of either")
        if len(prompt) > MAX_PROMPTS:
            raise _wrong_prompt(f"prompt has {len(prompt)} entries; at most {MAX_PROMPTS} prompts are allowed")
        all_texts = all(isinstance(item, str) for item in prompt)
        if not all_texts and not all(_is_token_ids(item) or item == [] for item in prompt):
            raise _wrong_prompt("prompt must hold texts only, token ids only, or arrays of token ids only")
        return prompt

    def check_choices(self) -> None:
        """Bounds that take several fields.

        Raises:
            UnsupportedParameterError: best_of would have to choose.
            InvalidParameterError: too many choices.
        """
        n = self.n or 1
        if self.best_of not in (None, 1, n):
            raise UnsupportedParameterError(
                f"best_of is {self.best_of} and n is {n}; choosing the best is not implemented: leave best_of out",
                param="best_of",
            )
        if (choices := len(self.prompts) * n) > MAX_CHOICES:
            raise InvalidParameterError(
                f"{len(self.prompts)} prompts x n = {n} is {choices} choices; at most {MAX_CHOICES} are allowed",
                param="n",
            )


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _wrong_prompt(message: str) -> InvalidParameterError:
    return InvalidParameterError(message, param="prompt")


class CompletionLogprobsInfo(ResponseModel):
    """Four parallel lists, one entry a token; null where nothing precedes."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="characters of text before the token")


class CompletionChoice(ResponseModel):
    """One answer to one prompt; in the order p0n0 p0n1 p1n0 p1n1."""

    index: int
    text: str
    logprobs: CompletionLogprobsInfo | None
    finish_reason: FinishReasonName
    stop_reason: int | str | None = Field(None, description="the stop token or string that ended it")
    token_ids: list[int] | None = Field(None, description=TOKEN_IDS_DESCRIPTION)
    prompt_token_ids: list[int] | None = Field(None, description=TOKEN_IDS_DESCRIPTION)
    prompt_logprobs: PromptLogprobsInfo | None = Field(None, description=PROMPT_LOGPROBS_DESCRIPTION)


class Completion(ResponseModel):
    """The whole answer."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo


class CompletionChunkChoice(ResponseModel):
    """What a chunk adds to a choice."""

    index: int
    text: str
    logprobs: CompletionLogprobsInfo | None
    finish_reason: FinishReasonName | None
    token_ids: list[int] | None = Field(None, description=TOKEN_IDS_DESCRIPTION)
    prompt_token_ids: list[int] | None = Field(None, description="with return_token_ids, in a choice's first chunk")


class CompletionChunk(ResponseModel):
    """One event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: UsageInfo | None = None
