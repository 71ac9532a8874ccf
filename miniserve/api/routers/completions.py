"""`POST /v1/completions`: from prompts, as text or token ids, to their continuations."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from miniserve.api.body import parse_body
from miniserve.api.deps import EngineDep, Server, ServerDep, require_key
from miniserve.api.errors import call_id_of
from miniserve.api.generation import Call, Choice, Echo, respond
from miniserve.api.logprobs import CompletionLogprobs
from miniserve.api.openapi import errors, event_stream, json_body
from miniserve.api.request_log import log_request
from miniserve.api.schemas.completions import DEFAULT_MAX_TOKENS, Completion, CompletionChunk, CompletionRequest
from miniserve.api.schemas.fields import COMPLETIONS_REFUSED
from miniserve.core.request import Request as EngineRequest
from miniserve.engine.build import EngineParts
from miniserve.engine.input_processor import InputProcessor
from miniserve.errors import RequestError
from miniserve.sampling_params import SamplingParams

router = APIRouter(tags=["generation"], dependencies=[Depends(require_key)])


class CompletionSpelling:
    """`text`, in a plain answer and in a chunk."""

    object = "text_completion"
    chunk_object = "text_completion"

    def opening(self) -> str | None:
        """There is no role to announce."""
        return None

    def text(self, text: str) -> str:
        """More text."""
        return f'"text":{text}'

    def ending(self) -> str:
        """Nothing but the finish reason."""
        return '"text":""'

    def whole(self, text: str) -> dict[str, Any]:
        """The text."""
        return {"text": text}


@router.post(
    "/v1/completions",
    summary="Continue prompts",
    response_model=Completion,
    responses=event_stream(CompletionChunk) | errors(400, 401, 404, 413, 429, 500, 503),
    openapi_extra=json_body(CompletionRequest),
)
async def create_completion(request: Request, server: ServerDep, engine: EngineDep) -> Response:
    """As OpenAI's endpoint of this name."""
    engine.check_admission()
    asked, call = await server.process_body(
        request, partial(_prepare, server, engine.parts, call_id_of(request, "cmpl"))
    )
    return await respond(request, engine, call, CompletionSpelling(), asked)


def _prepare(server: Server, parts: EngineParts, call_id: str, body: bytes) -> tuple[CompletionRequest, Call]:
    """Everything that can be wrong with the request is found here, in a worker thread."""
    asked = parse_body(body, CompletionRequest, COMPLETIONS_REFUSED)
    model = server.model_name(asked.model)
    asked.check_stream_options()
    asked.check_choices()
    sampling = _sampling(asked, parts)
    prompts = asked.prompts
    choices: list[Choice] = []
    for number, prompt in enumerate(prompts):
        prompt_id = call_id if len(prompts) == 1 else f"{call_id}-p{number}"
        if server.config.log_requests:
            log_request(prompt_id, json.dumps(prompt, ensure_ascii=False), sampling, asked.n)
        try:
            choices += _choices(asked, prompt_id, prompt, sampling, parts.input_processor, first_index=len(choices))
        except RequestError as error:
            if len(prompts) > 1 and error.param == "prompt":
                error.args = (f"prompt[{number}]: {error}",)
            raise
    return asked, Call(call_id, int(time.time()), model, choices)


def _sampling(asked: CompletionRequest, parts: EngineParts) -> SamplingParams:
    echoes_logprobs = asked.logprobs if asked.echo else None
    max_tokens = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
    return asked.sampling(
        parts.sampling_defaults, max_tokens=max_tokens, logprobs=asked.logprobs, prompt_logprobs=echoes_logprobs
    )


def _choices(
    asked: CompletionRequest,
    prompt_id: str,
    prompt: str | list[int],
    sampling: SamplingParams,
    processor: InputProcessor,
    *,
    first_index: int,
) -> list[Choice]:
    """The choices of one prompt."""
    request = _request(asked, prompt_id, prompt, sampling, processor)
    echo = None
    if asked.echo:
        token_ids = tuple(request.token_ids)
        # Of token ids, as of text: all that was sent is the prompt, special tokens too.
        text = prompt if isinstance(prompt, str) else processor.tokenizer.decode(token_ids, skip_special_tokens=False)
        echo = Echo(text, token_ids)
    choices: list[Choice] = []
    for choice_request in processor.choices(request, asked.n or 1):
        logprobs = None if asked.logprobs is None else _logprobs(sampling, processor, echo)
        parent = choices[0] if choices else None
        choices.append(Choice(first_index + len(choices), choice_request, parent, logprobs, echo))
    return choices


def _request(
    asked: CompletionRequest,
    prompt_id: str,
    prompt: str | list[int],
    sampling: SamplingParams,
    processor: InputProcessor,
) -> EngineRequest:
    """The prompt, checked against the context: with the output's length only where the client named one."""
    explicit = asked.max_tokens is not None
    request = processor.process_prompt(
        prompt_id,
        prompt,
        sampling if explicit else replace(sampling, max_tokens=None),
        add_special_tokens=asked.add_special_tokens is not False,
    )
    if not explicit:  # the default gives way at the context's end
        request.sampling = replace(request.sampling, max_tokens=sampling.max_tokens)
    return request


def _logprobs(sampling: SamplingParams, processor: InputProcessor, echo: Echo | None) -> CompletionLogprobs:
    tokenizer, skip_special = processor.tokenizer, sampling.skip_special_tokens
    if echo is None:
        return CompletionLogprobs(tokenizer, skip_special=skip_special)
    # The tokens of a prompt may begin with what is not in its text: BOS, the space that SentencePiece puts first.
    spelled = tokenizer.decode(echo.token_ids, skip_special_tokens=False)
    start = len(echo.text) - len(spelled) if spelled.endswith(echo.text) else 0
    return CompletionLogprobs(
        tokenizer,
        skip_special=skip_special,
        start=start,
        end_of_prompt=len(echo.text),
        num_prompt_tokens=len(echo.token_ids),
    )
