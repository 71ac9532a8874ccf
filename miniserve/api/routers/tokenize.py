"""`POST /tokenize` and `POST /detokenize`: what the model would see. They do not wait for the engine."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from miniserve.api.body import parse_body
from miniserve.api.deps import ServerDep, require_key
from miniserve.api.logprobs import token_text
from miniserve.api.openapi import errors, json_body
from miniserve.api.schemas.fields import DETOKENIZE_REFUSED, TOKENIZE_REFUSED
from miniserve.api.schemas.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from miniserve.engine.input_processor import InputProcessor
from miniserve.errors import InvalidParameterError

router = APIRouter(tags=["tokens"], dependencies=[Depends(require_key)])


@router.post(
    "/tokenize",
    summary="Text or messages to token ids",
    response_model=TokenizeResponse,
    responses=errors(400, 401, 404, 413, 500, 503),
    openapi_extra=json_body(TokenizeRequest),
)
async def tokenize(request: Request, server: ServerDep) -> Response:
    """The ids that a completion of the prompt, or a chat completion of the messages, would start with."""
    processor = server.engine.parts.input_processor

    def process(body: bytes) -> dict[str, Any]:
        asked = parse_body(body, TokenizeRequest, TOKENIZE_REFUSED)
        server.model_name(asked.model)
        tokens = _tokens(asked, processor)
        strings = [token_text(processor.tokenizer.token_bytes(token)) for token in tokens]
        return {
            "count": len(tokens),
            "max_model_len": processor.max_model_len,
            "tokens": tokens,
            "token_strs": strings if asked.return_token_strs else None,
        }

    return JSONResponse(await server.process_body(request, process))


def _tokens(asked: TokenizeRequest, processor: InputProcessor) -> list[int]:
    asked.check_kind()
    if asked.messages is None:
        assert asked.prompt is not None
        return processor.tokenize_prompt(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)
    messages = [message.model_dump(exclude_unset=True) for message in asked.messages]
    return processor.tokenize_chat(messages, asked.chat_options())


@router.post(
    "/detokenize",
    summary="Token ids to text",
    response_model=DetokenizeResponse,
    responses=errors(400, 401, 404, 413, 500, 503),
    openapi_extra=json_body(DetokenizeRequest),
)
async def detokenize(request: Request, server: ServerDep) -> Response:
    """Special tokens are spelled out."""
    processor = server.engine.parts.input_processor

    def process(body: bytes) -> dict[str, Any]:
        asked = parse_body(body, DetokenizeRequest, DETOKENIZE_REFUSED)
        server.model_name(asked.model)
        for token_id in asked.tokens:
            if not 0 <= token_id < processor.num_token_ids:
                raise InvalidParameterError(
                    f"tokens has the token id {str(token_id)[:40]}; the vocabulary goes from 0 to "
                    f"{processor.num_token_ids - 1}",
                    param="tokens",
                )
        return {"prompt": processor.tokenizer.decode(asked.tokens, skip_special_tokens=False)}

    return JSONResponse(await server.process_body(request, process))
