"""A small chat server that says what a test tells it to. On a thread, over real sockets."""

from __future__ import annotations

import json
import os
import queue
import select
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

DEADLINE = 30.0  # seconds, for what should come at once


class ChatServer:
    """Answers each chat request with the next script.

    A script is a list of steps: bytes are sent as they are, an int is an HTTP status with an error body, an event is
    waited for, None breaks the connection, as a server does that dies.

    Attributes:
        requests: the bodies of the chat requests, with their headers under "headers".
        gone: gets an item when a client closes its connection during an answer that waits.
    """

    def __init__(self, *scripts: Sequence[Any], port: int = 0) -> None:
        self.scripts = list(scripts)
        self.requests: list[dict[str, Any]] = []
        self.gone: queue.Queue[bool] = queue.Queue()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.port = self._http.server_address[1]
        self.base_url = f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(DEADLINE)


def event(**fields: Any) -> bytes:
    """One chunk."""
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def delta(text: str) -> bytes:
    """A chunk of text."""
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])


def reasoning_delta(text: str, *names: str) -> bytes:
    """A chunk of reasoning, under the names that servers give it."""
    fields = dict.fromkeys(names or ("reasoning_content", "reasoning"), text)
    return event(choices=[{"index": 0, "delta": {"content": None, **fields}, "finish_reason": None}])


def ending(prompt: int = 40, cached: int = 32, completion: int = 7, finish_reason: str = "stop") -> Iterator[bytes]:
    """The last chunks of a stream."""
    details = {"cached_tokens": cached}
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    yield event(choices=[{"index": 0, "delta": {}, "finish_reason": finish_reason}])
    yield event(choices=[], usage=usage)
    yield b"data: [DONE]\n\n"


def answer(*texts: str) -> list[bytes]:
    """A whole answer in so many deltas."""
    role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    return [role, *map(delta, texts), *ending()]


def _handler(server: ChatServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            body = {"data": [{"id": "tiny"}]} if self.path == "/v1/models" else {"status": "ok"}
            self._answer(200, body)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append(body | {"headers": dict(self.headers)})
            script = server.scripts.pop(0)
            if isinstance(script[0], int):
                self._answer(script[0], {"error": {"message": "the reason"}})
                return
            if script[0] is None:
                self._break()
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for step in script:
                if not self._play(step):
                    return

        def _play(self, step: bytes | threading.Event | None) -> bool:
            if isinstance(step, bytes):
                self.wfile.write(step)
                return True
            if step is None:
                self._break()
                return False
            while not step.wait(0.02):
                if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1):
                    server.gone.put(True)
                    return False
            return True

        def _break(self) -> None:
            """Close with a reset, as the system does for a process that was killed with data on their way."""
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler
