"""The calls of the chat to a server, over HTTP.

Owns the request's body, the lines of an event stream, and the words for a connection that fails. Does not know what an
event says, nor the screen.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from miniserve.tui.errors import ChatError, NotYetError
from miniserve.tui.settings import Settings


class ChatClient:
    """The calls to the server. They raise ChatError, or NotYetError if another try may help."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._base = settings.base_url.rstrip("/")
        headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        # A server on this machine is never behind the proxy that the environment may name.
        remote = httpx.URL(self._base).host not in ("127.0.0.1", "localhost", "::1")
        # Only connecting has a time limit: a long prompt on a slow machine takes its time.
        self._http = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(None, connect=5), trust_env=remote)

    async def is_healthy(self) -> bool:
        """Whether a model is loaded."""
        with suppress(httpx.RequestError):
            return (await self._http.get(self._base.removesuffix("/v1") + "/health", timeout=5)).status_code == 200
        return False

    async def model_name(self) -> str:
        """The model that was asked for, or else the first one that the server lists."""
        if self._settings.model:
            return self._settings.model
        with _explained():
            response = await self._http.get(f"{self._base}/models", timeout=10)
            await _check(response)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ChatError(f"{self._base}/models lists no model; name one with --model") from None

    async def stream(self, model: str, messages: Sequence[dict[str, str]]) -> AsyncGenerator[list[bytes]]:
        """The answer's events, as many at once as came in. Closing the iterator ends the request on the server."""
        rest, done = b"", False
        request = self._http.stream("POST", f"{self._base}/chat/completions", json=self._body(model, messages))
        with _explained():
            async with request as response:
                await _check(response)
                async for read in response.aiter_bytes():
                    # Lines end at \n only: the JSON may hold characters that splitlines() takes for line ends.
                    *lines, rest = (rest + read).split(b"\n")
                    events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
                    done = done or b"[DONE]" in events
                    yield [event for event in events if event != b"[DONE]"]
        if not done:
            raise _broken()

    def _body(self, model: str, messages: Sequence[dict[str, str]]) -> dict[str, Any]:
        settings = self._settings
        system = [{"role": "system", "content": settings.system}] if settings.system else []
        options = {"max_tokens": settings.max_tokens, "temperature": settings.temperature}
        return {
            "model": model,
            "messages": [*system, *messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in options.items() if value is not None},
        }


async def _check(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    status, body = response.status_code, await response.aread()
    try:
        reason = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        reason = body[:200].decode(errors="replace")
    kind = NotYetError if status in (429, 502, 503, 504) else ChatError
    raise kind(f"HTTP {status}: {reason}" + (" (see --api-key)" if status == 401 else ""))


@contextmanager
def _explained() -> Iterator[None]:
    """Says in our words how the connection failed."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
        raise NotYetError(f"cannot connect ({_reason(error)}); start the server, or see --base-url") from None
    except httpx.TimeoutException:
        raise NotYetError("nothing came in time; the server may be busy") from None
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        raise _broken() from None
    except httpx.RequestError as error:  # not HTTP as it should be: the same in every try
        raise ChatError(f"the request failed ({_reason(error)}); see --base-url") from None


def _broken() -> NotYetError:
    return NotYetError("the connection broke before the answer was there; the server's log may say why")


def _reason(error: httpx.RequestError) -> str:
    return str(error) or type(error).__name__
