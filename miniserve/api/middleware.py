"""What every HTTP call passes through: its request id, its count in the metrics, the net for unexpected errors, CORS.

Plain ASGI: a chunk of a stream passes in a function call or two.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

from fastapi import FastAPI
from prometheus_client import Counter
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from miniserve.api.errors import CLIENT_CLOSED_REQUEST, describe_error
from miniserve.engine.prometheus import PrometheusMetrics

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


def install_middleware(
    app: FastAPI, *, metrics: PrometheusMetrics, model_name: str, allowed_origins: tuple[str, ...]
) -> None:
    """From the outside in: request id and count, CORS, unexpected errors."""
    app.add_middleware(UnexpectedErrorMiddleware)
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    requests = Counter(
        "miniserve_http_requests",
        "HTTP requests by route template and status.",
        ("model_name", "method", "route", "status"),
        registry=metrics.registry,
    )
    app.add_middleware(RequestMiddleware, requests=requests, model_name=model_name)


class RequestMiddleware:
    """Gives each request an id (`request.state.request_id`, the X-Request-Id of the answer) and counts it."""

    def __init__(self, app: ASGIApp, *, requests: Counter, model_name: str) -> None:
        self._app = app
        self._requests = requests
        self._model_name = model_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in _METHODS else "other"
        if method == "HEAD":  # as GET, without the body, which the server leaves out; probes ask like this
            scope = {**scope, "method": "GET"}
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status = CLIENT_CLOSED_REQUEST

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                nonlocal status
                status = message["status"]
                header = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._requests.labels(self._model_name, method, _route(scope), str(status)).inc()


def _request_id(scope: Scope) -> str:
    """The client's, where it is harmless; else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            sent: bytes = value
            return sent.decode()
    return uuid.uuid4().hex


def _route(scope: Scope) -> str:
    """The route's template: the path itself would make a time series for every address that somebody tries."""
    route: Any = scope.get("route")
    return getattr(route, "path", None) or "unmatched"


class UnexpectedErrorMiddleware:
    """Answers 500 for what nobody caught. Once an answer has begun, nothing can be said: the connection breaks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            if started:
                raise
            response = describe_error(error, scope["state"]["request_id"]).response()
            await response(scope, receive, send)
