"""`POST /v1/completions`: from prompts, as text or token ids, to their continuations."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from miniserve.api.body import parse_body
from miniserve.api.choice import Choice, Echo, check_prompt_logprobs
from miniserve.api.deps import EngineDep, Server, ServerDep, require_key
from miniserve.api.errors import call_id_of
from miniserve.api.generation import Call, respond
from miniserve.api.logprobs import CompletionLogprobs
from miniserve.api.openapi import errors, event_stream, json_body
from miniserve.api.request_log import log_request
from miniserve.api.schemas.completions import DEFAULT_MAX_TOKENS, Completion, CompletionChunk, CompletionRequest
from miniserve.api.schemas.fields import COMPLETIONS_REFUSED
from miniserve.core.request import Request as EngineRequest
from miniserve.engine.answer import Answer, AnswerDelta
from miniserve.engine.build import EngineParts
from miniserve.engine.input_processor import InputProcessor
from miniserve.errors import RequestError
from miniserve.sampling_params import SamplingParams
from miniserve.text.parsers.base import TextDelta
from miniserve.text.tokenizer import Tokenizer

router = APIRouter(tags=["generation"], dependencies=[Depends(require_key)])


class CompletionSpelling:
    """`text`, in a plain answer and in a chunk."""

    object = "text_completion"
    chunk_object = "text_completion"
    prompt_in_choice = True

    def opening(self) -> str | None:
        """There is no role to announce."""
        return None

    def delta(self, delta: AnswerDelta, call_ids: Sequence[str]) -> str:
        """More text; nothing else is looked for in a completion."""
        assert isinstance(delta, TextDelta)
        return f'"text":{json.dumps(delta.text)}'

    def ending(self) -> str:
        """Nothing but the finish reason."""
        return '"text":""'

    def whole(self, answer: Answer, call_ids: Sequence[str]) -> dict[str, Any]:
        """The text."""
        return {"text": answer.text}


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
    asked.check_stream()
    asked.check_choices()
    choices: list[Choice] = []
    sampling = _sampling(asked, parts)
    for number, prompt in enumerate(asked.prompts):
        prompt_id = f"{call_id}-p{number}" if len(asked.prompts) > 1 else call_id
        if server.config.log_requests:
            log_request(prompt_id, json.dumps(prompt, ensure_ascii=False), sampling, asked.n)
        with _numbering(number if len(asked.prompts) > 1 else None):
            choices += _choices(asked, prompt_id, prompt, sampling, parts.input_processor, first_index=len(choices))
    param = "logprobs" if asked.prompt_logprobs is None else "prompt_logprobs"  # of an echo
    check_prompt_logprobs(choices, sampling.prompt_logprobs, param=param)
    return asked, Call(call_id, int(time.time()), model, choices)


@contextmanager
def _numbering(number: int | None) -> Iterator[None]:
    """Let faults of a prompt say which of them it is."""
    try:
        yield
    except RequestError as error:
        if number is not None and error.param == "prompt":
            error.args = (f"prompt[{number}]: {error}",)
        raise


def _sampling(asked: CompletionRequest, parts: EngineParts) -> SamplingParams:
    """The prompt's logprobs have two uses: whichever wants more candidates decides how many are computed."""
    uses = (asked.prompt_logprobs, asked.logprobs if asked.echo else None)
    return asked.sampling(
        parts.sampling_defaults,
        max_tokens=DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens,
        logprobs=asked.logprobs,
        prompt_logprobs=max((number for number in uses if number is not None), default=None),
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
    echo = _echo(asked, prompt, request, processor.tokenizer) if asked.echo else None
    choices: list[Choice] = []
    for choice_request in processor.choices(request, asked.n or 1):
        choice = Choice(
            first_index + len(choices),
            choice_request,
            parent=choices[0] if choices else None,
            logprobs=None if asked.logprobs is None else _logprobs(request, processor.tokenizer, echo),
            echo=echo,
            returns_token_ids=asked.return_token_ids or False,
        )
        choices.append(choice)
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
        options=asked.options,
    )
    if not explicit:  # the default gives way at the context's end
        request.sampling = replace(request.sampling, max_tokens=sampling.max_tokens)
    return request


def _echo(asked: CompletionRequest, prompt: str | list[int], request: EngineRequest, tokenizer: Tokenizer) -> Echo:
    """All that was sent is the prompt, special tokens too; unless it was truncated, what was left of it."""
    if isinstance(prompt, str) and asked.truncate_prompt_tokens is None:
        return Echo(prompt, asked.logprobs or 0)
    return Echo(tokenizer.decode(request.token_ids, skip_special_tokens=False), asked.logprobs or 0)


def _logprobs(request: EngineRequest, tokenizer: Tokenizer, echo: Echo | None) -> CompletionLogprobs:
    skip_special = request.sampling.skip_special_tokens
    if echo is None:
        return CompletionLogprobs(tokenizer, skip_special=skip_special)
    # The tokens of a prompt may begin with what is not in its text: BOS, the space that SentencePiece puts first.
    spelled = tokenizer.decode(request.token_ids, skip_special_tokens=False)
    return CompletionLogprobs(
        tokenizer,
        skip_special=skip_special,
        start=len(echo.text) - len(spelled) if spelled.endswith(echo.text) else 0,
        end_of_prompt=len(echo.text),
        num_prompt_tokens=request.num_prompt_tokens,
    )
