"""Request bodies: read within the size limit, parsed as strict JSON, validated into a schema.

FastAPI's own body parsing is not used: it reads without a limit, takes NaN and nests without a bound, and its errors
are not OpenAI's. Every fault here is a `RequestError` that names the field and shows the value, cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, TypeVar

import pydantic
from pydantic_core import ErrorDetails, from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from miniserve.api.schemas.fields import Refused, check_refused
from miniserve.errors import InvalidParameterError, RequestError, RequestTooLargeError, shown

Schema = TypeVar("Schema", bound=pydantic.BaseModel)
# A number that is not finite is spelled so, or has an exponent or hundreds of digits: only then is the object searched.
_MAY_BE_INFINITE = re.compile(rb"NaN|Infinity|\d[eE]\+?\d|\d{300}")
_DISCARD_SECONDS = 2.0
# Pydantic's kinds of complaints in the words of JSON; the others speak for themselves.
_COMPLAINTS = {
    "list_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "string_type": "must be a string",
    "string_unicode": "must be valid Unicode",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
}
_MAX_SHOWN = 80
_MAX_DEPTH = 200  # the parser's


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
            await _discard(request.receive, max_bytes)
            raise _too_large(max_bytes)
    return b"".join(chunks)


async def _discard(receive: Receive, num_bytes: int) -> None:
    """Read on for a while, and as much again at most: a client that is still sending would not see the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            async for chunk in _chunks(receive):
                num_bytes -= len(chunk)
                if num_bytes < 0:
                    return


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
        raise InvalidParameterError(f"Content-Type must be application/json, got {shown(content_type)}")
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise InvalidParameterError(f"Content-Encoding {shown(encoding)} is not supported; send the body as it is")


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


@contextlib.contextmanager
def naming_sent_fields(sent_name: Callable[[str | None], str | None]) -> Iterator[None]:
    """Let faults name a field as it was sent: the engine knows some by one name only."""
    try:
        yield
    except RequestError as error:
        known, sent = error.param, sent_name(error.param)
        if known is not None and sent is not None and sent != known:
            error.param = sent
            error.args = (str(error).replace(known, sent),)
        raise


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        parsed = from_json(body)
    except ValueError as error:
        problem = str(error)
        if problem.startswith("recursion limit"):
            raise InvalidParameterError(
                f"the body nests too deep: it may have {_MAX_DEPTH} arrays and objects in each other; make it flatter"
            ) from None
        if "escape" in problem or "surrogate" in problem:
            problem += "; the halves of a surrogate pair, \\ud800 to \\udfff, only make sense together"
        raise InvalidParameterError(f"the body is not valid JSON: {problem}") from None
    if not isinstance(parsed, dict):
        raise InvalidParameterError(f"the body must be a JSON object, got {shown(parsed)}")
    if _MAY_BE_INFINITE.search(body):
        for name, value in parsed.items():
            if not _is_finite(value):
                raise InvalidParameterError(
                    f"{name[:_MAX_SHOWN]} has a number that is not finite: NaN, Infinity, or one as large as 1e999",
                    param=name,
                )
    return parsed


def _is_finite(value: Any) -> bool:
    """Whether all numbers in it are. Recursion is safe: the parser bounds the depth."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list) or all(map(_is_finite, value))


def _translated(error: ErrorDetails) -> InvalidParameterError:
    """Pydantic's first complaint in our words."""
    location = error["loc"]
    param = str(location[0]) if location else None
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if error["type"] == "missing":
        return InvalidParameterError(f"{path[:_MAX_SHOWN]} is required", param=param)
    expected = _COMPLAINTS.get(error["type"], _in_our_words(error["msg"])).format(**error.get("ctx", {}))
    return InvalidParameterError(f"{path[:_MAX_SHOWN]} {expected}, got {shown(error['input'])}", param=param)


def _in_our_words(complaint: str) -> str:
    return complaint.removeprefix("Input ").replace("should", "must", 1)
