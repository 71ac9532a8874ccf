"""What comes over the wire and is no proper request: too long, too slow, cut, or of another kind."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack

import pytest

from tests.contract.calls import check_error_object
from tests.faults.conftest import REQUEST_SECONDS, Target
from tests.faults.raw import completion, connect, exchange, request, status

BODY = b'{"prompt": "Hi", "max_tokens": 1}'
GET = b"GET /health HTTP/1.1\r\n"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (request(BODY, "Content-Length: 5", "Connection: close"), {400}),
        (request(BODY, "Content-Length: -1"), {400}),
        (request(BODY, "Content-Length: 99999999999999999999999"), {400, 413}),
        (request(b"", f"Content-Length: {2**40}"), {408, 413}),
        (request(BODY, "Content-Length: 33", "Content-Length: 34"), {400}),
        (request(BODY, "Transfer-Encoding: chunked", "Content-Length: 33"), {400}),
        (request(b"zz\r\n", "Transfer-Encoding: chunked"), {400}),
        (request(b"ffffffffffffffffff\r\n", "Transfer-Encoding: chunked"), {400}),
        (GET + b"X: " + b"a" * 100_000 + b"\r\n\r\n", {400}),
        (GET + b"X: a\r\n" * 10_000 + b"\r\n", {400}),
        (b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\n\r\n", {0, 400}),
        (b"\r\n" * 10, {0, 400}),
        (b"POST * HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", {400, 404, 405}),
        (b"GET http://elsewhere/v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", {200, 400, 404}),
        (b"GET //v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", {404}),
        (b"GET /v1/../metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", {404}),
        (b"GET /v1%2fmodels HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", {200, 404}),
        (b"GET /%ff%00 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", {404}),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n", {200, 400}),
        (b"GET /health HTTP/1.1\r\nHost: \x01\xff\r\nConnection: close\r\n\r\n", {200, 400}),
        (b"CONNECT elsewhere:80 HTTP/1.1\r\nHost: x\r\n\r\n", {0, 400, 404, 405}),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {0, 400}),
    ],
    ids=[
        *("short length", "negative length", "absurd length", "length of 1 TB", "two lengths", "length and chunks"),
        *(
            "no chunk",
            "absurd chunk",
            "header of 100 KB",
            "10,000 headers",
            "address of 1 MB",
            "empty lines",
            "asterisk",
        ),
        *("another host's address", "two slashes", "dots", "an encoded slash", "an encoded null", "two hosts"),
        *("a strange host", "CONNECT", "HTTP/2"),
    ],
)
def test_it_is_answered_or_closed(target: Target, data: bytes, expected: set[int]) -> None:
    received = exchange(target.server, data)
    assert status(received) in expected, received[:300]
    assert received.count(b"HTTP/1.1 ") <= 2  # what follows a body of a wrong length is a request of its own


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: a",
        b"GET /hea",
        request(BODY, "Content-Length: 5000"),
        request(b'5\r\n{"pro\r\n', "Transfer-Encoding: chunked"),
    ],
    ids=["headers", "request line", "body", "chunks"],
)
def test_a_request_that_never_ends(target: Target, data: bytes) -> None:
    """It is told so, and closed, when its time is over."""
    start = time.monotonic()
    received = exchange(target.server, data)
    assert REQUEST_SECONDS - 1 < time.monotonic() - start < REQUEST_SECONDS + 5
    assert status(received) == 408
    check_error_object(json.loads(received.partition(b"\r\n\r\n")[2])["error"], 408)


def test_a_byte_at_a_time_is_no_way_around_the_time(target: Target) -> None:
    """Bug kind: each byte began the time anew."""
    start = time.monotonic()
    with connect(target.server) as connection:
        received = b""
        connection.settimeout(0.2)
        for byte in b"GET /health HTTP/1.1\r\nX: " + b"a" * 200:
            try:
                connection.sendall(bytes([byte]))
                received += connection.recv(4096)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            if received:
                break
    assert time.monotonic() - start < REQUEST_SECONDS + 3
    assert status(received) in (0, 408)


def test_a_connection_that_says_nothing_is_closed(target: Target) -> None:
    with connect(target.server) as connection:
        assert connection.recv(1) == b""


def test_a_long_answer_is_not_a_slow_request(target: Target) -> None:
    """The time is that of the request, not of the answer."""
    with connect(target.server) as connection:
        connection.sendall(completion(max_tokens=900, ignore_eos=True, stream=True))
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            part = connection.recv(65536)
            assert part, received[-300:]
            received += part
    assert b"[DONE]" in received and status(received) == 200


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["streamed", "plain"])
def test_a_request_behind_a_long_answer_has_its_time_then(target: Target, stream: bool) -> None:
    """Bug: the server did not read on while it answered, and then the answer was broken off with a 408 within it."""
    first = completion(max_tokens=900, ignore_eos=True, stream=stream)
    second = completion("Connection: close", max_tokens=1)
    with connect(target.server, seconds=60) as connection:
        connection.sendall(first + second[:-10])
        time.sleep(0.3)
        connection.sendall(second[-10:])
        received = read_to_the_end(connection)
    assert received.count(b"HTTP/1.1 200 OK") == received.count(b"HTTP/1.1 ") == 2
    assert received.count(b"[DONE]") == stream and received.rstrip().endswith(b"}")


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "plain"])
@pytest.mark.parametrize(
    "behind",
    [
        b"GARBAGE\r\n\r\n",
        b"FOO / HTTP/1.1\r\n\r\n",
        GET + b"X: " + b"a" * 200_000,
        request(b"zz\r\n", "Transfer-Encoding: chunked"),
        completion(max_tokens=1) + b"GARBAGE\r\n\r\n",
    ],
    ids=["garbage", "no method", "a header of 200 KB", "no chunk", "a request and garbage"],
)
def test_what_is_no_request_behind_one(target: Target, behind: bytes, stream: bool) -> None:
    """Bug: the error was written into the middle of the answer that was on its way."""
    with connect(target.server, seconds=60) as connection:
        connection.sendall(completion(max_tokens=100, ignore_eos=True, stream=stream))
        target.server.wait_for(lambda numbers: numbers["running"] == 1)
        connection.sendall(behind)
        received = read_to_the_end(connection)
    num_answers = 2 if behind.startswith(b"POST") and b"zz" not in behind else 1
    assert received.count(b"HTTP/1.1 200 OK") == received.count(b"HTTP/1.1 ") == num_answers
    assert received.count(b"[DONE]") == stream and received.count(b'"finish_reason":"length"') >= num_answers


def test_a_client_that_leaves_with_a_request_behind_another(target: Target) -> None:
    """Bug: only the last request of the connection heard of it, and the one that ran was computed to its end."""
    with connect(target.server) as connection:
        connection.sendall(2 * completion(max_tokens=900, ignore_eos=True, stream=True))
        target.server.wait_for(lambda numbers: numbers["running"] == 1)
        num_aborted = target.server.stats()["requests_finished"]["abort"]
    numbers = target.server.wait_for(lambda numbers: numbers["running"] == numbers["waiting"] == 0)
    assert numbers["requests_finished"]["abort"] == num_aborted + 1


def read_to_the_end(connection: socket.socket) -> bytes:
    """Until the server closes."""
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def test_many_slow_senders_beside_a_fast_one(target: Target) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(connect(target.server)) for _ in range(200)]
        for connection in slow:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\nX-Slow: ")
        assert target.server.complete("Hi", max_tokens=5).num_tokens == 5
        assert target.server.http.get("/health").elapsed.total_seconds() < 1.0


def test_expect(target: Target) -> None:
    received = exchange(target.server, request(BODY, "Expect: 100-continue", "Connection: close"))
    assert status(received) in (100, 200) and b"200 OK" in received


def test_http_1_0(target: Target) -> None:
    received = exchange(target.server, request(BODY, version="1.0"))
    assert status(received) == 200 and b'"choices"' in received


def test_a_client_that_has_nothing_more_to_say(target: Target) -> None:
    """Half-closed, it counts as gone or is answered; either way nothing is left behind."""
    received = exchange(target.server, completion(max_tokens=4), half_close=True)
    assert status(received) in (0, 200)


def test_pipelined_requests(target: Target) -> None:
    """Fifty at once on a connection; the answers come in order, all of them."""
    data = b"".join(completion(prompt=f"{index}", max_tokens=1, echo=True) for index in range(50))
    with connect(target.server, seconds=60) as connection:
        connection.sendall(data)
        received = b""
        while received.count(b"HTTP/1.1 200") < 50 or received.count(b'"usage"') < 50:
            part = connection.recv(65536)
            assert part, f"closed after {received.count(b'HTTP/1.1 200')} answers"
            received += part
        with pytest.raises((ConnectionError, TimeoutError, socket.timeout)):
            connection.settimeout(0.2)
            assert connection.recv(1) == b""
            raise ConnectionError("closed")
