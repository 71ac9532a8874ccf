"""Request bodies: read within the size limit, parsed as strict JSON, validated into a schema.

FastAPI's own body parsing is not used: it reads without a limit, takes NaN and nests without a bound, and its errors
are not OpenAI's. Every fault here is a `RequestError` that names the field and shows the value, cut.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import pydantic
from pydantic_core import ErrorDetails, from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from miniserve.api.schemas.fields import Refused, check_refused
from miniserve.errors import InvalidParameterError, RequestTooLargeError

Schema = TypeVar("Schema", bound=pydantic.BaseModel)
# A number that overflows to infinity has an exponent or hundreds of digits: only then is the object searched for one.
_MAY_OVERFLOW = re.compile(rb"\d[eE]\+?\d|\d{300}")
_MAX_SHOWN = 80


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        InvalidParameterError: it is not declared as plain JSON.
        RequestTooLargeError: it is over the limit; nothing beyond is kept.
        ClientDisconnect: the client went away.
    """
    _check_headers(request.headers)
    declared = request.headers.get("content-length", "")
    declares_too_much = declared.isdecimal() and int(declared[:20]) > max_bytes
    if declares_too_much and "expect" in request.headers:  # it waits to be asked for the body
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in _chunks(request.receive):
        size += len(chunk)
        if size <= max_bytes and not declares_too_much:
            chunks.append(chunk)
        else:
            chunks.clear()
        # As much again is read and dropped: a client that is still sending would not see the answer.
        if size > 2 * max_bytes:
            break
    if size > max_bytes or declares_too_much:
        raise _too_large(max_bytes)
    return b"".join(chunks)


async def _chunks(receive: Receive) -> AsyncGenerator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        yield message.get("body", b"")
        more = message.get("more_body", False)


def _check_headers(headers: Headers) -> None:
    content_type = headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise InvalidParameterError(f"Content-Type must be application/json, got {_shown(content_type)}")
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise InvalidParameterError(f"Content-Encoding {_shown(encoding)} is not supported; send the body as it is")


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the body has more than {max_bytes} bytes; send less, or raise --max-body-bytes")


def parse_body(body: bytes, schema: type[Schema], refused: tuple[Refused, ...]) -> Schema:
    """The body as a validated `schema`. Slow for a large body: call it in a worker thread.

    Raises:
        UnsupportedParameterError: it sets a field of `refused`.
        InvalidParameterError: anything else is wrong.
    """
    fields = _parse_object(body)
    check_refused(fields, refused)
    try:
        return schema.model_validate(fields)
    except pydantic.ValidationError as error:
        raise _translated(error.errors(include_url=False)[0]) from None


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        parsed = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidParameterError(f"the body is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidParameterError(f"the body must be a JSON object, got {_shown(parsed)}")
    if _MAY_OVERFLOW.search(body) and _has_infinity(parsed):
        raise InvalidParameterError("the body has a number that is too large, such as 1e999")
    return parsed


def _has_infinity(value: Any) -> bool:
    """Recursion is safe: the parser bounds the depth."""
    if isinstance(value, float):
        return math.isinf(value)
    if isinstance(value, dict):
        return any(map(_has_infinity, value.values()))
    return isinstance(value, list) and any(map(_has_infinity, value))


def _translated(error: ErrorDetails) -> InvalidParameterError:
    """Pydantic's first complaint in our words."""
    location = error["loc"]
    param = str(location[0]) if location else None
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if error["type"] == "missing":
        return InvalidParameterError(f"{path[:_MAX_SHOWN]} is required", param=param)
    expected = error["msg"].removeprefix("Input ")
    return InvalidParameterError(f"{path[:_MAX_SHOWN]} {expected}, got {_shown(error['input'])}", param=param)


def _shown(value: Any) -> str:
    """A wrong value for an error message: it may be a megabyte, or an integer of thousands of digits."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value[: _MAX_SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
