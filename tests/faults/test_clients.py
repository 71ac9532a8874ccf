"""Clients that go away, read slowly, or come in crowds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.contract.calls import COMPLETIONS
from tests.faults.conftest import CANARY, Target
from tests.faults.raw import completion, connect, reset, status

LONG = {"max_tokens": 400, "ignore_eos": True, "stream": True}


def first_byte(target: Target, **fields: Any) -> Any:
    """A stream of which one byte was read."""
    connection = connect(target.server, seconds=60)
    connection.sendall(completion(**{**LONG, **fields}))
    assert connection.recv(1) == b"H"
    return connection


@pytest.mark.parametrize("end", ["FIN", "RST"])
def test_a_storm_of_clients_that_go_away(target: Target, end: str) -> None:
    """A hundred streams, closed behind their first byte: their requests end within moments."""
    with ThreadPoolExecutor(100) as pool:
        connections = [connect(target.server, seconds=60) for _ in range(100)]
        for connection in connections:
            connection.sendall(completion(**LONG))
        ended = [pool.submit(_leave, connection, end) for connection in connections]
        for future in ended:
            future.result()


def _leave(connection: Any, end: str) -> None:
    with contextlib.suppress(ConnectionError, TimeoutError):
        connection.settimeout(0.5)
        connection.recv(1)
    connection.close() if end == "FIN" else reset(connection)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["FIN", "RST"])
def test_five_hundred_of_them(target: Target, end: str) -> None:
    with ThreadPoolExecutor(500) as pool:
        connections = [connect(target.server, seconds=60) for _ in range(500)]
        for connection in connections:
            connection.sendall(completion(**LONG))
        for future in [pool.submit(_leave, connection, end) for connection in connections]:
            future.result()


Numbers = dict[str, Any]


@pytest.mark.parametrize(
    ("fields", "phase"),
    [
        ({"prompt": "Hi"}, lambda numbers: numbers["running"] >= 1),
        ({"prompt": "a b c " * 250, "max_tokens": 50}, lambda numbers: numbers["running"] >= 1),
        ({"prompt": "Hi", "n": 4}, lambda numbers: numbers["running"] >= 4),
        ({"prompt": ["Hi"] * 12}, lambda numbers: numbers["waiting"] >= 1),
    ],
    ids=["decode", "prefill", "four choices", "queued"],
)
def test_a_plain_call_is_cancelled_in_every_phase(
    target: Target, fields: Numbers, phase: Callable[[Numbers], bool]
) -> None:
    """Not streamed: the server only notices by the connection."""
    connection = connect(target.server)
    connection.sendall(completion(**{**LONG, "stream": False, **fields}))
    target.server.wait_for(phase)
    connection.close()


def test_a_stream_with_some_choices_finished_is_cancelled(target: Target) -> None:
    with first_byte(target, n=4, stop=["e"], temperature=1.0):
        time.sleep(0.3)


def test_slow_readers_do_not_hold_up_others(target: Target) -> None:
    """Streams that nobody reads; their text waits for them, and is bounded by their length."""
    alone = _seconds(target)
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(first_byte(target, max_tokens=100))
        time.sleep(0.2)
        beside = _seconds(target)
    assert beside < 20 * alone + 5


def _seconds(target: Target) -> float:
    start = time.perf_counter()
    assert target.server.post(COMPLETIONS, **CANARY).json()["choices"][0]["text"] == target.golden
    return time.perf_counter() - start


def test_idle_connections_beside_active_ones(target: Target) -> None:
    """Four hundred that say nothing; within the time that they have for it."""
    with ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(connect(target.server))
        with ThreadPoolExecutor(8) as pool, httpx.Client(base_url=target.server.url, timeout=60) as http:
            answers = pool.map(lambda _: http.post(COMPLETIONS, json=CANARY), range(8))
            assert {answer.json()["choices"][0]["text"] for answer in answers} == {target.golden}


@pytest.mark.slow
def test_overload_for_half_a_minute(target: Target) -> None:
    """Three times what it can do: every request ends in an answer or a 429, and /health answers throughout."""
    end = time.monotonic() + 30
    slowest = 0.0

    def ask(_index: int) -> list[int]:
        codes = []
        with connect(target.server, seconds=120) as connection:
            while time.monotonic() < end:
                connection.sendall(completion(max_tokens=20, ignore_eos=True))
                received = b""
                while b"\r\n\r\n" not in received or not received.rstrip().endswith(b"}"):
                    received += connection.recv(65536)
                codes.append(status(received))
        return codes

    with ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(ask, index) for index in range(24)]
        while time.monotonic() < end:
            start = time.perf_counter()
            assert target.server.http.get("/health").status_code == 200
            slowest = max(slowest, time.perf_counter() - start)
            time.sleep(0.05)
        codes = [code for future in asked for code in future.result()]
    assert set(codes) <= {200, 429} and codes.count(200) > 24
    assert slowest < 2.0


def test_answers_are_those_of_a_quiet_server(target: Target) -> None:
    """Forty at once, plain and streamed: each gets its own answer, and nobody another's."""
    prompts = [f"{CANARY['prompt']}" if index % 2 else f"Count: {index}" for index in range(40)]
    with ThreadPoolExecutor(40) as pool, httpx.Client(base_url=target.server.url, timeout=60) as http:

        def text(prompt: str) -> str:
            answer: str = http.post(COMPLETIONS, json={**CANARY, "prompt": prompt}).json()["choices"][0]["text"]
            return answer

        quiet = {prompt: text(prompt) for prompt in set(prompts)}
        assert list(pool.map(text, prompts)) == [quiet[prompt] for prompt in prompts]
