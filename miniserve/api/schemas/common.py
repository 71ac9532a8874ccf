"""What several endpoints share: the sampling fields of a request, usage, errors.

The bounds stand here once more than in `SamplingParams` so that /openapi.json and docs/API.md can show them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from miniserve.engine.openai_fields import STRUCTURED_OUTPUTS, parse_response_format, parse_structured_outputs
from miniserve.engine.options import MAX_SALT_LENGTH, RequestOptions
from miniserve.errors import InvalidParameterError
from miniserve.sampling_params import (
    MAX_GRAMMAR_LENGTH,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS,
    SamplingParams,
    StructuredOutput,
)

MAX_N = 128
MAX_PROMPTS = 1024
MAX_CHOICES = 1024  # prompts x n

_TOKEN_ID = re.compile(r"-?(0|[1-9][0-9]{0,17})")
# Fields that go to `SamplingParams` as they are.
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "seed",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


class RequestModel(BaseModel):
    """A request body: no "0.5" for a number and no true for an integer; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class ResponseModel(BaseModel):
    """Describes an answer. Answers are not built from it: that would cost more than the rest of a chunk."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


def _as_stop_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise InvalidParameterError("stop must be a string or an array of strings", param="stop")
    return value


def _as_logit_bias(value: Any) -> Any:
    """JSON's keys are strings, the engine's are token ids."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIASES:
        raise InvalidParameterError(
            f"logit_bias has {len(value)} keys; at most {MAX_LOGIT_BIASES} are allowed", param="logit_bias"
        )
    for key in value:
        if _TOKEN_ID.fullmatch(key) is None:
            raise InvalidParameterError(
                f'logit_bias has the key {key[:80]!r}; keys are token ids, such as "42"', param="logit_bias"
            )
    return {int(key): bias for key, bias in value.items()}


_STOP_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_LENGTH},
        {
            "type": "array",
            "maxItems": MAX_STOP_STRINGS,
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_LENGTH},
        },
        {"type": "null"},
    ]
}
_LOGIT_BIAS_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "maxProperties": MAX_LOGIT_BIASES,
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,17})$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS},
        },
        {"type": "null"},
    ]
}

_JSON_SCHEMA = {"type": "object"}
_RESPONSE_FORMAT_SCHEMA = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]},
        {
            "type": "object",
            "properties": {"type": {"const": "json_object"}, "schema": _JSON_SCHEMA},
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                        "schema": _JSON_SCHEMA,
                        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                    },
                    "required": ["name", "schema"],
                },
            },
            "required": ["type", "json_schema"],
        },
        {"type": "null"},
    ]
}
_STRUCTURED_SOURCES: dict[str, dict[str, Any]] = {
    "json": {"anyOf": [_JSON_SCHEMA, {"type": "string"}]},
    "regex": {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_LENGTH},
    "choice": {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
    "grammar": {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_LENGTH},
    "json_object": {"const": True},
}
_STRUCTURED_OUTPUTS_SCHEMA = {
    "anyOf": [
        *(
            {"type": "object", "properties": {kind: _STRUCTURED_SOURCES[kind]}, "required": [kind]}
            for kind in STRUCTURED_OUTPUTS
        ),
        {"type": "null"},
    ]
}

Number = float | None
LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
StopField = Annotated[list[str] | None, BeforeValidator(_as_stop_list), WithJsonSchema(_STOP_SCHEMA)]
LogitBiasField = Annotated[dict[int, float] | None, BeforeValidator(_as_logit_bias), WithJsonSchema(_LOGIT_BIAS_SCHEMA)]
TOKEN_IDS_DESCRIPTION = "only with return_token_ids"
PROMPT_LOGPROBS_DESCRIPTION = (
    "only with prompt_logprobs: for each token of the prompt, token id -> logprob, rank and text; null for the first"
)
MODEL_DESCRIPTION = "a served model's name; without it, the first one"


class StreamOptions(RequestModel):
    """What a stream carries besides text."""

    include_usage: bool | None = Field(None, description="one more chunk at the end, with the usage")
    continuous_usage_stats: bool | None = Field(None, description="the usage so far in every chunk")


class SamplingFields(RequestModel):
    """What chat and plain completions have in common."""

    model: str | None = Field(None, description=MODEL_DESCRIPTION)
    temperature: Number = Field(None, ge=0, le=2, description="0 is greedy; default: the model's, else 1")
    top_p: Number = Field(None, gt=0, le=1, description="nucleus; default: the model's, else 1")
    top_k: int | None = Field(None, ge=-1, description="0 or -1 is off; default: the model's, else off")
    min_p: Number = Field(None, ge=0, le=1, description="relative to the most probable; default: the model's, else 0")
    presence_penalty: Number = Field(None, ge=-2, le=2, description="counts output tokens only")
    frequency_penalty: Number = Field(None, ge=-2, le=2, description="counts output tokens only")
    repetition_penalty: Number = Field(
        None, gt=0, le=MAX_REPETITION_PENALTY, description="counts prompt and output; 1 is off"
    )
    logit_bias: LogitBiasField = Field(
        None,
        description=f"token id -> number in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]; at most {MAX_LOGIT_BIASES} keys",
    )
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED, description="makes the answer reproducible")
    n: int | None = Field(None, ge=1, le=MAX_N, description=f"choices per prompt; prompts x n <= {MAX_CHOICES}")
    stop: StopField = Field(
        None,
        description=f"a string or up to {MAX_STOP_STRINGS}, each of 1 to {MAX_STOP_STRING_LENGTH} characters; "
        "a special token's text matches by id",
    )
    stop_token_ids: list[int] | None = Field(
        None, fail_fast=True, max_length=MAX_STOP_TOKEN_IDS, description="end the output too"
    )
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS, description="nothing ends the output before")
    ignore_eos: bool | None = Field(None, description="the model's end tokens do not end the output")
    include_stop_str_in_output: bool | None = Field(None, description="show the stop string too")
    skip_special_tokens: bool | None = Field(None, description="special tokens leave no text; default true")
    # Checked where they are taken apart: a union of shapes has no readable errors.
    response_format: Annotated[Any, WithJsonSchema(_RESPONSE_FORMAT_SCHEMA)] = Field(
        None, description="text, json_object, or json_schema: the answer is JSON that is valid against the schema"
    )
    structured_outputs: Annotated[Any, WithJsonSchema(_STRUCTURED_OUTPUTS_SCHEMA)] = Field(
        None,
        description="exactly one of json (a schema), regex, choice (a list of answers), grammar (in llguidance's Lark) "
        "and json_object (true); not beside response_format, nor a tool_choice that demands calls",
    )
    prompt_logprobs: LogprobCount | None = Field(
        None,
        description="report each prompt token's logprob, and of so many most probable ones; not with stream; at most "
        "500,000 in an answer, all prompts and choices together, those of an echo as well",
    )
    return_token_ids: bool | None = Field(None, description="the ids of the prompt and of the output too")
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=MAX_TOKENS,
        description="keep only so many last tokens of the prompt; -1: as many as leave room for the answer",
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_SALT_LENGTH,
        description="share cached prefixes only with requests of the same salt",
    )
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="lower comes first; needs --scheduling-policy priority, unless 0"
    )
    stream: bool | None = Field(None, description="answer as server-sent events")
    stream_options: StreamOptions | None = Field(
        None, description="with stream only: include_usage, continuous_usage_stats"
    )

    def check_stream(self) -> None:
        """Raises InvalidParameterError for what makes sense only with a stream, or only without."""
        if self.stream_options is not None and not self.stream:
            raise InvalidParameterError(
                "stream_options are for streams; set stream to true, or leave them out", param="stream_options"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidParameterError(
                "prompt_logprobs are not part of a stream; leave out stream, or them", param="prompt_logprobs"
            )

    @property
    def answer_format(self) -> StructuredOutput | None:
        """What the answer has to look like.

        Raises:
            InvalidParameterError, UnsupportedParameterError: it has no known shape, or there are two.
        """
        asked, extension = (
            parse_response_format(self.response_format),
            parse_structured_outputs(self.structured_outputs),
        )
        if asked is not None and extension is not None:
            raise InvalidParameterError(
                "response_format and structured_outputs both say what the answer looks like; send one of them",
                param="structured_outputs",
            )
        return extension if asked is None else asked

    @property
    def options(self) -> RequestOptions:
        """How the engine has to treat the request."""
        return RequestOptions(
            cache_salt=self.cache_salt,
            priority=self.priority or 0,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )

    def sampling(self, defaults: Mapping[str, Any], **own: Any) -> SamplingParams:
        """The engine's view. What the request does not name comes from `defaults`; `own` is the endpoint's.

        Raises:
            InvalidParameterError: a value is out of range.
        """
        named = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **{**defaults, **named},
            logit_bias=self.logit_bias or {},
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            structured_outputs=self.answer_format,
            **own,
        )


class PromptTokensDetails(ResponseModel):
    """Where the prompt's tokens came from."""

    cached_tokens: int = Field(description="taken from the prefix cache")


class CompletionTokensDetails(ResponseModel):
    """What the output's tokens are of."""

    reasoning_tokens: int = Field(description="of the reasoning before the answer, its tags included")


class UsageInfo(ResponseModel):
    """Token counts of a call: each prompt once, all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PromptLogprob(ResponseModel):
    """A token that may stand at a place of the prompt."""

    logprob: float
    rank: int = Field(description="1 is the most probable")
    decoded_token: str


PromptLogprobsInfo = list[dict[str, PromptLogprob] | None]


class ErrorDetail(ResponseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = Field(description="the request's field at fault")
    code: str | None


class ErrorResponse(ResponseModel):
    """Every answer that is not a success."""

    error: ErrorDetail


FinishReasonName = Literal["stop", "length"]
