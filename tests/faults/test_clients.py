"""Clients that go away, in every phase of a request and in storms, and clients that read slowly."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from tests.contract.calls import COMPLETIONS, fold, plain, streamed
from tests.faults.conftest import CANARY, KEY, Target, attacked_light
from tests.faults.raw import END_OF_CHUNKS, completion, connect, is_whole, read_answer, reset, response_of

LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "stream": True}
Numbers = dict[str, Any]


# Storms


def leave(connection: socket.socket, end: str) -> None:
    """Behind the first byte, if one comes soon."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        connection.settimeout(0.5)
        connection.recv(1)
    connection.close() if end == "FIN" else reset(connection)


def storm(target: Target, number: int, end: str) -> None:
    """So many streams at once, all left."""
    with ThreadPoolExecutor(number) as pool:
        connections = [connect(target.server, seconds=60) for _ in range(number)]
        for connection in connections:
            connection.sendall(completion(**LONG))
        for future in [pool.submit(leave, connection, end) for connection in connections]:
            future.result()


@pytest.mark.parametrize("end", ["FIN", "RST"])
def test_a_storm_of_clients_that_go_away(target: Target, end: str) -> None:
    """A hundred streams, closed behind their first byte: their requests end within moments."""
    storm(target, 100, end)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["FIN", "RST"])
def test_five_hundred_of_them(target: Target, end: str) -> None:
    storm(target, 500, end)


def good_answers_in_a_storm(target: Target, num_good: int, num_reset: int) -> None:
    """Streams are begun and reset one after the other on each of 16 threads; beside them every answer is exact."""

    def begin_and_reset(_index: int) -> None:
        connection = connect(target.server)
        connection.sendall(completion(**LONG))
        leave(connection, "RST")

    with (
        ThreadPoolExecutor(16) as bad,
        ThreadPoolExecutor(16) as good,
        httpx.Client(base_url=target.server.url, timeout=120) as http,
    ):
        ended = [bad.submit(begin_and_reset, index) for index in range(num_reset)]
        answers = list(good.map(lambda _: http.post(COMPLETIONS, json=CANARY), range(num_good)))
        for future in ended:
            future.result()
    assert [plain(answer).text for answer in answers] == [target.golden] * num_good


def test_good_answers_in_a_storm(target: Target) -> None:
    good_answers_in_a_storm(target, 20, 50)


@pytest.mark.slow
def test_two_hundred_good_answers_while_five_hundred_streams_are_reset(target: Target) -> None:
    good_answers_in_a_storm(target, 200, 500)


# Cancelled in each phase


def running(number: int) -> Callable[[Numbers], bool]:
    """The condition that so many are."""
    return lambda numbers: numbers["running"] == number


def num_aborted(target: Target) -> int:
    """Requests that ended because their clients left, so far."""
    number: int = target.server.stats()["requests_finished"]["abort"]
    return number


@contextmanager
def ended_early(target: Target, number: int) -> Iterator[None]:
    """Within it, clients leave so many requests: no more and no less end as aborted, and soon."""
    before = num_aborted(target)
    yield
    target.server.wait_for(lambda numbers: numbers["requests_finished"]["abort"] >= before + number)
    target.server.wait_until_idle()
    assert num_aborted(target) == before + number


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize(
    ("fields", "phase", "number"),
    [
        ({"prompt": "Hi"}, lambda numbers: numbers["running"] >= 1, 1),
        ({"prompt": "Hi", "n": 4}, lambda numbers: numbers["running"] >= 4, 4),
        ({"prompt": ["Hi"] * 12}, lambda numbers: numbers["waiting"] >= 1, 12),
        ({"prompt": [301] * 980, "max_tokens": 40}, lambda numbers: 0 < numbers["kv_blocks_used"] < 30, 1),
    ],
    ids=["decode", "four choices", "queued", "prefill"],
)
def test_a_call_is_cancelled_in_every_phase(
    target: Target, fields: Numbers, phase: Callable[[Numbers], bool], number: int, stream: bool
) -> None:
    """Of a call that is not streamed, or has no token yet, the server only notices by the connection."""
    salt = str(stream)  # or the second would find the first one's prefix
    with ended_early(target, number):
        connection = connect(target.server)
        connection.sendall(completion(**{**LONG, "stream": stream, "cache_salt": salt, **fields}))
        target.server.wait_for(phase)
        connection.close()


def test_a_call_is_cancelled_before_it_is_read(target: Target) -> None:
    """The server may find out before or behind it, and is through with all of them soon."""
    before = num_calls_ended(target)
    for _ in range(20):
        with connect(target.server) as connection:
            connection.sendall(completion(**LONG))
    target.server.wait_for(lambda _: num_calls_ended(target) == before + 20)


def num_calls_ended(target: Target) -> float:
    """How many calls for completions the server is through with, answered or not."""
    lines = target.server.http.get("/metrics").text.splitlines()
    name = "miniserve_http_requests_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and COMPLETIONS in line)


def test_a_call_is_cancelled_before_its_first_token(target: Target) -> None:
    """It has waited so long that its headers are out, behind eight others."""
    with ended_early(target, 9), connect(target.server) as others, connect(target.server) as connection:
        others.sendall(completion(prompt=["Hi"] * 8, max_tokens=900, ignore_eos=True))
        target.server.wait_for(lambda numbers: numbers["running"] == 8)
        connection.sendall(completion(**LONG))
        assert b"data:" not in connection.recv(4096)
        assert target.server.stats()["waiting"] >= 1


def test_a_stream_with_a_choice_finished_is_cancelled(target: Target) -> None:
    """The first of four choices has met its stop; the others have not."""
    received, before = b"", num_aborted(target)
    fields = {**LONG, "n": 4, "stop": [" the"], "temperature": 1.0, "seed": 5}
    with connect(target.server) as connection:
        connection.sendall(completion(**fields))
        while b'"finish_reason":"stop"' not in received:
            received += connection.recv(4096)
    assert 1 <= received.count(b'"finish_reason":"stop"') < 4 and not received.endswith(END_OF_CHUNKS)
    target.server.wait_for(lambda numbers: 0 < numbers["requests_finished"]["abort"] - before < 4)


def test_a_preempted_call_is_cancelled(target: Target) -> None:
    """Three grow beyond the cache, the newest has to wait, and is left; the others' answers are exact."""
    prompts = [[token_id] * 660 for token_id in (401, 402, 403)]
    fields = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
    alone = [target.server.complete(prompt, **fields).text for prompt in prompts[:2]]
    preempted = target.server.stats()["preemptions"]
    with ExitStack() as stack, ended_early(target, 1):
        connections = [stack.enter_context(connect(target.server)) for _ in prompts]
        for number, connection in enumerate(connections):
            connection.sendall(completion(prompt=prompts[number], **fields))
            target.server.wait_for(running(number + 1))
        target.server.wait_for(lambda numbers: numbers["preemptions"] > preempted and numbers["waiting"] == 1)
        connections[2].close()
        target.server.wait_for(lambda numbers: numbers["waiting"] == 0)
        answers = [plain(response_of(read_answer(connection))).text for connection in connections[:2]]
    assert answers == alone


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_half_closed_connection_counts_as_gone(target: Target, stream: bool) -> None:
    """TCP tells the end of sending and the end of the client in the same way; the second is what happens."""
    with ended_early(target, 1), connect(target.server) as connection:
        connection.sendall(completion(**{**LONG, "stream": stream}))
        target.server.wait_for(lambda numbers: numbers["running"] == 1)
        connection.shutdown(socket.SHUT_WR)
        received = read_answer(connection)
    assert b"[DONE]" not in received and b'"usage":{' not in received


# Slow readers


def others_beside(target: Target, number: int, max_tokens: int) -> None:
    """So many read a byte a second each: others are as fast as without them, and one reads its rest, which is whole."""
    fields = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 5}
    whole = target.server.complete("Hi", **fields).content()
    alone, resident = seconds_of_eight(target), target.process.memory_info().rss
    with ExitStack() as stack:
        readers = [stack.enter_context(connect(target.server, buffer_bytes=1024)) for _ in range(number)]
        for reader in readers:
            reader.sendall(completion(**streamed(fields)))
        received = read_slowly(target, readers)
        assert seconds_of_eight(target) < 3 * alone + 1
        assert target.process.memory_info().rss - resident < 20 * 2**20
        assert fold(response_of(read_answer(readers[0], received))).content() == whole


def read_slowly(target: Target, readers: list[socket.socket]) -> bytes:
    """A byte a second of each until all answers are computed; what the first one has."""
    received = b""
    while True:
        first, *_ = [reader.recv(1) for reader in readers]
        received += first
        numbers = target.server.stats()
        if numbers["running"] == numbers["waiting"] == 0:
            return received
        time.sleep(1)


def seconds_of_eight(target: Target) -> float:
    """The time of eight canaries at once."""
    start = time.perf_counter()
    texts = target.server.complete([CANARY["prompt"]] * 8, temperature=0, max_tokens=12).texts
    assert texts == [target.golden] * 8
    return time.perf_counter() - start


def test_slow_readers_do_not_hold_up_others(target: Target) -> None:
    others_beside(target, 6, 30)


@pytest.mark.slow
def test_fifty_slow_readers(target: Target) -> None:
    others_beside(target, 50, 100)


AUTHORIZED = f"Authorization: Bearer {KEY}"
LARGE: dict[str, Any] = {"prompt": "<<endless>>", "max_tokens": 6000, "logprobs": 20}


def test_an_answer_larger_than_the_kernel_keeps(light: Target) -> None:
    """The server holds back what nobody takes, and computes on; the whole is there when it is read at last."""
    whole = light.server.complete(**LARGE).content()
    resident = light.process.memory_info().rss
    with connect(light.server, buffer_bytes=1024) as connection:
        connection.sendall(completion(AUTHORIZED, **streamed(LARGE)))
        received = connection.recv(1)
        light.server.wait_until_idle()
        answer = fold(response_of(read_answer(connection, received)))
        assert light.process.memory_info().rss - resident < 40 * 2**20
    assert answer.content() == whole
    assert len(answer.chunks) < 6000, "it was never held up: the kernel took everything"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel has no such bound")
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_who_never_reads_is_let_go(stream: bool) -> None:
    """Bug: such a client kept its connection, and the text of its answer, for ever."""
    with attacked_light("--timeout-unread", "1") as light, connect(light.server, buffer_bytes=1024) as connection:
        connection.sendall(completion(AUTHORIZED, **LARGE, stream=stream))
        assert connection.recv(1) == b"H"
        light.server.wait_until_idle()
        time.sleep(3)
        assert not is_whole(read_answer(connection, b"H"))
        light.check_unharmed()
