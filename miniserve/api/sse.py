"""Answers that take time: the event stream, and the watch for clients that go away.

Owns when the HTTP headers go out and how a stream ends. Does not know what the events say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
Write = Callable[[str], Awaitable[None]]

DONE = "data: [DONE]\n\n"


def event(data: str) -> str:
    """One server-sent event; `data` is JSON, so it has no line break."""
    return f"data: {data}\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        ClientDisconnect: it went away first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watch.cancel()
        # The work's own clean-up (the abort in the engine) is over before this returns.
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A `text/event-stream` that `produce` writes.

    The headers go out with the first write: a fault before is an ordinary HTTP error, raised from here. A fault after
    becomes one event, as `describe` words it. Either way the stream ends with `[DONE]`. A client that goes away
    cancels `produce`; a client that reads slowly holds it up in `write`.
    """

    media_type = "text/event-stream"

    def __init__(self, produce: Callable[[Write], Awaitable[None]], describe: Callable[[Exception], str]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._produce = produce
        self._describe = describe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the call."""
        started = False

        async def write(events: str) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if events:
                await send({"type": "http.response.body", "body": events.encode(), "more_body": True})

        async def run() -> None:
            try:
                await self._produce(write)
            except Exception as error:
                if not started:
                    raise
                await write(event(self._describe(error)))
            await write("")
            await send({"type": "http.response.body", "body": DONE.encode(), "more_body": False})

        try:
            await until_disconnect(receive, run())
        except ClientDisconnect:
            if not started:
                raise
