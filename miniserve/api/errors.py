"""Every error in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`.

Owns what of an error may be told to a client: messages written for users, cut; never a traceback or the text of an
unexpected exception, which stay in the log. Does not know what the errors are about.
"""

from __future__ import annotations

import json
import logging
import uuid
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from miniserve.errors import InternalError, MiniserveError

# With the worst escaping, six bytes a character, the body stays under 4 KB.
MAX_MESSAGE_LENGTH = 600
MAX_PARAM_LENGTH = 40
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; the metrics count it
_RETRY_SECONDS = "1"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as the client sees it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        error = {
            "message": cut(self.message, MAX_MESSAGE_LENGTH),
            "type": self.type,
            "param": None if self.param is None else cut(self.param, MAX_PARAM_LENGTH),
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> Response:
        """The HTTP answer."""
        body = json.dumps(self.body(), ensure_ascii=False).encode(errors="backslashreplace")
        return Response(body, status_code=self.status, headers=self.headers, media_type="application/json")


def cut(text: str, length: int) -> str:
    """The beginning of a text that may be long."""
    return text if len(text) <= length else text[: length - 3] + "..."


def describe_error(error: Exception, request_id: str) -> ErrorInfo:
    """What to tell the client about `error`; what it must not see goes to the log, under `request_id`."""
    if isinstance(error, MiniserveError) and error.status != InternalError.status:
        return ErrorInfo(error.status, str(error), error.type, error.param, error.code, _headers(error.status))
    if isinstance(error, HTTPException):
        return _describe_http_error(error)
    if isinstance(error, InternalError):
        message = str(error)
    else:
        logger.error("request %s failed", request_id, exc_info=error)
        message = "the server failed on this request"
    message = f"{cut(message, MAX_MESSAGE_LENGTH - 200)}; its request id is {request_id}"
    return ErrorInfo(InternalError.status, message, InternalError.type, None, InternalError.code)


def _headers(status: int) -> dict[str, str]:
    match status:
        case 401:
            return {"WWW-Authenticate": "Bearer"}
        case 413:
            return {"Connection": "close"}  # the rest of the body is not read
        case 429 | 503:
            return {"Retry-After": _RETRY_SECONDS}
    return {}


def _describe_http_error(error: HTTPException) -> ErrorInfo:
    """What the router itself raises: an unknown URL, or a method that it does not take."""
    headers = dict(error.headers or {})
    match error.status_code:
        case 404:
            message, code = "no such URL; GET /openapi.json lists what there is", "unknown_url"
        case 405:
            message, code = f"this URL takes {headers.get('Allow', 'another method')}", "method_not_supported"
        case _:
            message, code = str(error.detail), "invalid_value"
    return ErrorInfo(error.status_code, message, "invalid_request_error", None, code, headers)


def request_id_of(request: Request) -> str:
    """The id that the answer carries as X-Request-Id."""
    request_id: str = request.state.request_id
    return request_id


def call_id_of(request: Request, prefix: str) -> str:
    """The id of a call's answer and of its log line, by which the request id can be found in both.

    A client may send the same request id again, so one that it sent is completed.
    """
    request_id = request_id_of(request)
    was_sent = request.headers.get("x-request-id") == request_id
    return f"{prefix}-{request_id}-{uuid.uuid4().hex[:8]}" if was_sent else f"{prefix}-{request_id}"


async def _answer_with_error(request: Request, error: Exception) -> Response:
    return describe_error(error, request_id_of(request)).response()


async def _client_is_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every expected error in OpenAI's form; the middleware does it for the unexpected ones."""
    app.add_exception_handler(MiniserveError, _answer_with_error)
    app.add_exception_handler(HTTPException, _answer_with_error)
    app.add_exception_handler(ClientDisconnect, _client_is_gone)
