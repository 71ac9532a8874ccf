"""`POST /v1/chat/completions`: from messages to the assistant's turn."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from miniserve.api.body import parse_body
from miniserve.api.deps import EngineDep, Server, ServerDep, require_key
from miniserve.api.errors import call_id_of
from miniserve.api.generation import Call, Choice, respond
from miniserve.api.logprobs import ChatLogprobs
from miniserve.api.openapi import errors, event_stream, json_body
from miniserve.api.request_log import log_request
from miniserve.api.schemas.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from miniserve.api.schemas.fields import CHAT_REFUSED
from miniserve.engine.build import EngineParts
from miniserve.errors import ContextLengthError

router = APIRouter(tags=["generation"], dependencies=[Depends(require_key)])


class ChatSpelling:
    """`message` in a plain answer, `delta` in a chunk."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> str | None:
        """The role comes alone, and once a choice."""
        return '"delta":{"role":"assistant","content":""}'

    def text(self, text: str) -> str:
        """More content."""
        return f'"delta":{{"content":{text}}}'

    def ending(self) -> str:
        """Nothing but the finish reason."""
        return '"delta":{}'

    def whole(self, text: str) -> dict[str, Any]:
        """The message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation",
    response_model=ChatCompletion,
    responses=event_stream(ChatCompletionChunk) | errors(400, 401, 404, 413, 429, 500, 503),
    openapi_extra=json_body(ChatCompletionRequest),
)
async def create_chat_completion(request: Request, server: ServerDep, engine: EngineDep) -> Response:
    """As OpenAI's endpoint of this name."""
    engine.check_admission()
    asked, call = await server.process_body(
        request, partial(_prepare, server, engine.parts, call_id_of(request, "chatcmpl"))
    )
    return await respond(request, engine, call, ChatSpelling(), asked)


def _prepare(server: Server, parts: EngineParts, call_id: str, body: bytes) -> tuple[ChatCompletionRequest, Call]:
    """Everything that can be wrong with the request is found here, in a worker thread."""
    asked = parse_body(body, ChatCompletionRequest, CHAT_REFUSED)
    model = server.model_name(asked.model)
    asked.check_stream_options()
    sampling = asked.sampling(parts.sampling_defaults, max_tokens=asked.output_limit, logprobs=asked.num_logprobs)
    messages = asked.message_dicts()
    processor = parts.input_processor
    if server.config.log_requests:
        log_request(call_id, json.dumps(messages, ensure_ascii=False), sampling, asked.n)
    add_special_tokens = asked.add_special_tokens or False
    try:
        request = processor.process_chat(call_id, messages, sampling, add_special_tokens=add_special_tokens)
    except ContextLengthError as error:
        if error.param == "max_tokens":
            error.param = asked.output_limit_name
        raise
    choices: list[Choice] = []
    for index, choice_request in enumerate(processor.choices(request, asked.n or 1)):
        logprobs = ChatLogprobs(processor.tokenizer) if asked.logprobs else None
        choices.append(Choice(index, choice_request, choices[0] if choices else None, logprobs, None))
    return asked, Call(call_id, int(time.time()), model, choices)
