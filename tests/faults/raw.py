"""HTTP by hand: bytes as no client library would send them."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.contract.calls import Server

with contextlib.suppress(ImportError):
    import resource

SOCKET_SECONDS = 20.0
END_OF_CHUNKS = b"0\r\n\r\n"


def connect(server: Server, seconds: float = SOCKET_SECONDS, *, buffer_bytes: int | None = None) -> socket.socket:
    """A connection to it. `buffer_bytes`: what may wait for us on our side, about."""
    address = urlsplit(server.url)
    connection = socket.socket()
    connection.settimeout(seconds)
    if buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    try:
        connection.connect((address.hostname, address.port))
    except OSError:
        connection.close()
        raise
    return connection


def exchange(server: Server, data: bytes, *, half_close: bool = False) -> bytes:
    """Send bytes, and read until the server closes."""
    with connect(server) as connection:
        received = b""
        with contextlib.suppress(ConnectionError):  # it may have answered and closed before all was sent
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                received += part
    return received


def request(body: bytes, *headers: str, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    """A POST of a JSON body; `headers` come in addition, and replace the length where they name one."""
    lines = [f"POST {path} HTTP/{version}", "Host: x", "Content-Type: application/json", *headers]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def completion(*headers: str, **fields: Any) -> bytes:
    """A request for one, as bytes."""
    return request(json.dumps({"prompt": "Hi", **fields}).encode(), *headers)


def status(received: bytes) -> int:
    """Of an answer; 0 where the server closed without one."""
    return int(received[9:12]) if received.startswith(b"HTTP/1.") else 0


def read_answer(connection: socket.socket, received: bytes = b"") -> bytes:
    """One answer to its end, `received` of which was read before; what there is of it where the connection ends."""
    answer = bytearray(received)
    with contextlib.suppress(ConnectionError):
        while not is_whole(answer) and (part := connection.recv(65536)):
            answer += part
    return bytes(answer)


def is_whole(received: bytes | bytearray) -> bool:
    """Whether these bytes are one answer, from its first line to its end."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = bytes(received[:end]).lower()
    if b"transfer-encoding: chunked" in head:
        return received.endswith(END_OF_CHUNKS)
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    return len(received) == end + 4 + int(length.partition(b":")[2])


def response_of(received: bytes) -> httpx.Response:
    """A whole answer as `tests.contract.calls` reads them."""
    head, _, body = received.partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode("latin-1").split("\r\n")[1:])
    if headers.pop("transfer-encoding", None) == "chunked":
        body = _joined_chunks(body)
    return httpx.Response(status(received), headers=headers, content=body, request=httpx.Request("POST", "http://x"))


def _joined_chunks(body: bytes) -> bytes:
    parts, start = [], 0
    while size := int(body[start : (end := body.index(b"\r\n", start))], 16):
        parts.append(body[end + 2 : end + 2 + size])
        start = end + 2 + size + 2
    return b"".join(parts)


def reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it, now."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


# Open files


@contextlib.contextmanager
def soft_file_limit(number: int) -> Iterator[None]:
    """For this process and those that it starts meanwhile, which may raise it again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and number > hard:
        pytest.skip(f"this machine allows {hard} open files, and {number} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
