"""HTTP by hand: bytes as no client library would send them."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

from tests.contract.calls import Server

SOCKET_SECONDS = 20.0


def connect(server: Server, seconds: float = SOCKET_SECONDS) -> socket.socket:
    """A connection to it."""
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=seconds)


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


def completion(**fields: Any) -> bytes:
    """A request for one, as bytes."""
    return request(json.dumps({"prompt": "Hi", **fields}).encode())


def status(received: bytes) -> int:
    """Of an answer; 0 where the server closed without one."""
    return int(received[9:12]) if received.startswith(b"HTTP/1.") else 0


def reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
