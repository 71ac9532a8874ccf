"""HTTP as uvicorn speaks it, with bounds on what a client may send, and on the time that it may take for it."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

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
    _open: deque[RequestResponseCycle]  # whose head came in whole, and whose answer is not complete
    _is_coming_in = False  # the last of them: its body is not whole
    _is_broken = False  # nothing more is taken in; what is open is answered first
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new connection, whose first request is waited for."""
        super().connection_made(transport)
        self._open = deque()
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end of it, also for those whose answers are on their way or wait behind one."""
        self._clear_deadline()
        for cycle in self._open:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        """The head came in whole."""
        super().on_headers_complete()
        self._open.append(self.cycle)
        self._is_coming_in = True

    def on_message_complete(self) -> None:
        """The request came in whole."""
        self._clear_deadline()
        self._is_coming_in = False
        super().on_message_complete()
        if self.is_last_request:
            self.let_go()

    def on_response_complete(self) -> None:
        """The answer to the oldest one went out."""
        self._open.popleft()
        super().on_response_complete()
        if self._is_broken and not self._open:
            self.transport.close()

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
        """Nothing more is waited for, unless it was us who did not read on: another answer is on its way."""
        self._deadline = None
        if len(self._open) > self._is_coming_in:
            self._set_deadline()
        elif self._header_bytes:
            self._refuse("408 Request Timeout", f"The request did not come in whole within {self.request_seconds} s.")
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """What came in."""
        if self._is_broken:
            return
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
        self._refuse("400 Bad Request", msg)

    def _refuse(self, status: str, message: str) -> None:
        """Answer what is no request, and close: behind the answers that are on their way, not in the middle of one."""
        if self.transport.is_closing():
            return
        current = self.cycle if self._is_coming_in else None
        num_before = len(self._open) - self._is_coming_in
        if num_before == 0 and (current is None or not current.response_started):
            self._send_error(status, message)
        if num_before <= 0 and (current is None or not current.response_started or current.response_complete):
            self.transport.close()
            return
        self._is_broken = True
        self._clear_deadline()
        if num_before and current is not None:  # it waits for its turn, and would wait for its body then
            self.pipeline.popleft()
            self._open.pop()

    def _send_error(self, status: str, message: str) -> None:
        body = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":null}}' % message.encode()
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head += f"x-request-id: {uuid.uuid4().hex}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
