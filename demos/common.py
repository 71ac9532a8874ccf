"""How a demo ends: quietly when interrupted, and in one line when the server cannot be asked or goes away.

Owns what the demos against a running server say of failures and of their usage. Knows no demo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

import httpx
import openai

START = "uv run main.py serve --model smollm2"
MAX_MESSAGE = 200  # characters of what a server said


def run(demo: Callable[[], None], doc: str | None, base_url: str, start: str = START) -> None:
    """Run a demo as this process's only work; `doc` is its text with the usage, `start` what its server is run with."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage(doc or ""))
        return
    try:
        demo()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        fail(error, base_url, start)


def usage(doc: str) -> str:
    """The line that says how to call the demo, and what it shows."""
    lines = doc.splitlines()
    call = next(line.strip() for line in lines if "uv run demos/" in line)
    return f"usage: {call}\n{lines[0]}"


def fail(error: Exception, base_url: str, start: str) -> NoReturn:
    """End the process with what went wrong; of several failures at once, the first one that had begun."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    # The SDK wraps the transport's failures: those of httpx or of httpx2, whichever it finds, so names tell the kind
    cause = (error.__cause__ or error) if isinstance(error, openai.APIConnectionError) else error
    kinds = {kind.__name__ for kind in type(cause).__mro__}
    if kinds & {"ConnectError", "ConnectTimeout"}:
        sys.exit(f"no server at {base_url}; start one: {start}")
    if kinds & {"InvalidURL", "UnsupportedProtocol"}:
        sys.exit(f"{base_url[:MAX_MESSAGE]} is no URL of a server: {cause}; give one like http://127.0.0.1:8000/v1")
    if isinstance(cause, openai.APIStatusError):
        sys.exit(refusal(str(cause.response.url), cause.status_code, cause.body, cause.response.reason_phrase))
    if isinstance(cause, httpx.HTTPStatusError):
        answer = cause.response
        sys.exit(refusal(str(answer.url), answer.status_code, None, answer.reason_phrase))
    if "TransportError" in kinds or isinstance(cause, openai.APIConnectionError):
        print(flush=True)  # the answer may have come halfway through a line
        sys.exit(f"the connection broke: {one_line(str(cause)) or type(cause).__name__}")
    if isinstance(cause, openai.APIError):  # an error in the stream
        print(flush=True)
        sys.exit(f"the server broke off: {one_line(cause.message)}")
    raise error


def refusal(url: str, status: int, body: object, reason: str) -> str:
    """What a server answered in place of what was asked for."""
    said = str(body["message"]) if isinstance(body, dict) and "message" in body else reason
    hint = "; does the base URL end in /v1, and is it a miniserve?" if status == 404 else ""
    return f"{url} answers {status}: {one_line(said)}{hint}"


def one_line(text: str) -> str:
    """The text without line breaks, cut."""
    return " ".join(text.split())[:MAX_MESSAGE]
