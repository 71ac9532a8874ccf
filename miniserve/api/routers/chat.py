"""`POST /v1/chat/completions`: from messages to the assistant's turn."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from miniserve.api.body import naming_sent_fields, parse_body
from miniserve.api.choice import Choice, Tools, check_prompt_logprobs
from miniserve.api.deps import EngineDep, Server, ServerDep, require_key
from miniserve.api.errors import call_id_of
from miniserve.api.generation import Call, compact_json, respond
from miniserve.api.logprobs import ChatLogprobs
from miniserve.api.openapi import errors, event_stream, json_body
from miniserve.api.request_log import log_request
from miniserve.api.schemas.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from miniserve.api.schemas.fields import CHAT_REFUSED
from miniserve.engine.answer import Answer, AnswerDelta, ReasoningDelta
from miniserve.engine.build import EngineParts
from miniserve.engine.options import ChatOptions
from miniserve.text.parsers.base import ArgumentsDelta, CallStart, TextDelta

router = APIRouter(tags=["generation"], dependencies=[Depends(require_key)])


class ChatSpelling:
    """`message` in a plain answer, `delta` in a chunk."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_in_choice = False

    def opening(self) -> str | None:
        """The role comes alone, and once a choice."""
        return '"delta":{"role":"assistant","content":""}'

    def delta(self, delta: AnswerDelta, call_ids: Sequence[str]) -> str:
        """More content, reasoning, or of a tool call. Of a call, only the first part has the id and the name."""
        match delta:
            case TextDelta(text):
                # Escaped to ASCII: some clients take U+2028 and the like for the end of a line.
                return f'"delta":{{"content":{json.dumps(text)}}}'
            case ReasoningDelta(text):
                return f'"delta":{compact_json(_reasoning(text))}'
            case CallStart(index, name):
                call = {"index": index, **_tool_call(call_ids[index], name, "")}
            case ArgumentsDelta(index, text):
                call = {"index": index, "function": {"arguments": text}}
        return f'"delta":{{"tool_calls":[{compact_json(call)}]}}'

    def ending(self) -> str:
        """Nothing but the finish reason."""
        return '"delta":{}'

    def whole(self, answer: Answer, call_ids: Sequence[str]) -> dict[str, Any]:
        """The message; its content is null where there are only tool calls."""
        content = None if answer.tool_calls and not answer.text else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning:
            message |= _reasoning(answer.reasoning)
        if answer.tool_calls:
            calls = zip(call_ids, answer.tool_calls, strict=True)
            message["tool_calls"] = [_tool_call(call_id, call.name, call.arguments) for call_id, call in calls]
        return {"message": message}


def _reasoning(text: str) -> dict[str, str]:
    """Under both of its names: clients look for one or the other."""
    return {"reasoning_content": text, "reasoning": text}


def _tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


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
    asked.check_stream()
    with naming_sent_fields(asked.sent_name):
        chat = asked.chat_options()
        choices = _choices(server, parts, call_id, asked, chat)
    check_prompt_logprobs(choices, asked.prompt_logprobs, param="prompt_logprobs")
    return asked, Call(call_id, int(time.time()), model, choices)


def _choices(
    server: Server, parts: EngineParts, call_id: str, asked: ChatCompletionRequest, chat: ChatOptions
) -> list[Choice]:
    """The answers to come, each with a parser of its own."""
    processor, messages = parts.input_processor, asked.message_dicts()
    sampling = asked.sampling(
        parts.sampling_defaults,
        max_tokens=asked.output_limit,
        logprobs=asked.num_logprobs,
        prompt_logprobs=asked.prompt_logprobs,
    )
    if server.config.log_requests:
        log_request(call_id, json.dumps(messages, ensure_ascii=False), sampling, asked.n)
    request = processor.process_chat(call_id, messages, sampling, chat, asked.options)
    choices: list[Choice] = []
    for index, choice_request in enumerate(processor.choices(request, asked.n or 1)):
        parser = processor.tool_parser(chat, choice_request)
        choice = Choice(
            index,
            choice_request,
            parent=choices[0] if choices else None,
            logprobs=ChatLogprobs(processor.tokenizer) if asked.logprobs else None,
            tools=None if parser is None else Tools(parser, processor.tool_format.new_call_id),
            shows_reasoning=asked.include_reasoning is not False,
            returns_token_ids=asked.return_token_ids or False,
        )
        choices.append(choice)
    return choices
