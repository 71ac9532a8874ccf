"""The OpenAPI document. FastAPI makes most of it; bodies that it does not parse, and errors, are added here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from miniserve.api.schemas.chat import ChatCompletionChunk, ChatCompletionRequest
from miniserve.api.schemas.common import ErrorResponse
from miniserve.api.schemas.completions import CompletionChunk, CompletionRequest
from miniserve.api.schemas.fields import (
    CHAT_REFUSED,
    COMPLETIONS_REFUSED,
    DETOKENIZE_REFUSED,
    TOKENIZE_REFUSED,
    Refused,
)
from miniserve.api.schemas.tokenize import DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "the request is wrong",
    401: "no API key, or a wrong one",
    404: "no such model",
    413: "the body is too large",
    429: "too many requests wait already",
    500: "our fault",
    503: "the engine is loading, shutting down, dead, or stuck in a step",
}
REQUESTS: dict[type[BaseModel], tuple[Refused, ...]] = {
    ChatCompletionRequest: CHAT_REFUSED,
    CompletionRequest: COMPLETIONS_REFUSED,
    TokenizeRequest: TOKENIZE_REFUSED,
    DetokenizeRequest: DETOKENIZE_REFUSED,
}
_CHUNKS: tuple[type[BaseModel], ...] = (ChatCompletionChunk, CompletionChunk)


def json_body(schema: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that parses the body itself."""
    reference = {"$ref": _REF.format(model=schema.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that may fail so."""
    return {status: {"model": ErrorResponse, "description": _ERRORS[status]} for status in statuses}


def event_stream(chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that may answer with a stream of `chunk`s."""
    data = {"type": "string", "description": f"a {chunk.__name__} as JSON; of the last event [DONE]"}
    event = {"type": "object", "description": "one event of the stream", "required": ["data"]}
    content = {"text/event-stream": {"schema": {**event, "properties": {"data": data}}}}
    return {200: {"description": "the answer, or with `stream` a stream of it", "content": content}}


def install_openapi(app: FastAPI, *, with_keys: bool) -> None:
    """Replace `app.openapi`. `with_keys`: an API key is required."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, with_keys=with_keys)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, *, with_keys: bool) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    _, described = models_json_schema(
        [(model, "validation") for model in (*REQUESTS, *_CHUNKS)], ref_template=_REF, by_alias=True
    )
    schemas.update(described.get("$defs", {}))
    for model, refused in REQUESTS.items():
        schemas[model.__name__]["properties"] |= {rule.name: _refused_schema(rule) for rule in refused}
    if with_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in document["paths"].items():
            if path.startswith(("/v1/", "/tokenize", "/detokenize")):
                for operation in operations.values():
                    operation["security"] = [{"key": []}]
    return document


def _refused_schema(rule: Refused) -> dict[str, Any]:
    return {"description": "not implemented: other values are refused", "enum": [None, *rule.harmless]}
