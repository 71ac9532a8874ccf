"""HTTP as uvicorn speaks it, with bounds on what a client may send, and on the time that it may take for it."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 * 2**10  # request line and headers of one request


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's fast protocol, which takes headers of any size for any time, with bounds on both.

    The parser tells of a header (or a trailer) when it is whole, so what never becomes whole is bounded too: the bytes
    that came since it told of anything.
    """

    request_seconds = 60.0  # from a request's first byte, or the connection's beginning, to the request's last byte
    is_last_request = False  # whether connections end with the request that they are at
    _header_bytes = 0
    _silent_bytes = 0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new connection, whose first request is waited for."""
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end of it."""
        self._clear_deadline()
        super().connection_lost(exc)

    def on_message_complete(self) -> None:
        """The request came in whole."""
        self._clear_deadline()
        super().on_message_complete()
        if self.is_last_request:
            self.let_go()

    def let_go(self) -> None:
        """Let the current answer be the last, and say so.

        Not where it is too late to say it, nor while the request comes in: the client would not get to read the answer.
        """
        if self.cycle is not None and not self.cycle.more_body and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def _set_deadline(self) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(self.request_seconds, self._end_slow_request)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_slow_request(self) -> None:
        """Nothing more is waited for. Where an answer is on its way already, it must not be broken into."""
        self._deadline = None
        if self.transport.is_closing():
            return
        if self._header_bytes and (self.cycle is None or not self.cycle.response_started):
            self._send_error(
                "408 Request Timeout", f"The request did not come in whole within {self.request_seconds} s."
            )
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """What came in."""
        self._silent_bytes += len(data)
        super().data_received(data)
        if self._silent_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("")

    def _unsupported_upgrade_warning(self) -> None:
        """There are no WebSockets here; uvicorn would log advice to install some."""

    def on_message_begin(self) -> None:
        """A new request."""
        self._header_bytes = self._silent_bytes = 0
        self._set_deadline()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header. 32 bytes for what Python needs to keep it."""
        self._count(len(name) + len(value) + 32)
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """A part of the body, which the application bounds."""
        self._silent_bytes = 0
        super().on_body(body)

    def _count(self, num_bytes: int) -> None:
        self._silent_bytes = 0
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"the headers are larger than {MAX_HEADER_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        """What cannot be parsed as HTTP, in the same form as every other error."""
        if max(self._header_bytes, self._silent_bytes) > MAX_HEADER_BYTES:
            msg = f"The request line and headers are larger than {MAX_HEADER_BYTES} bytes; send less."
        self._send_error("400 Bad Request", msg)
        self.transport.close()

    def _send_error(self, status: str, message: str) -> None:
        body = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":null}}' % message.encode()
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
