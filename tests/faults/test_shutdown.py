"""The end under load: whoever has been let in gets an answer, an error, or a 503, and the process ends as it should.

What one client sees is in `tests/contract/test_lifecycle.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.calls import Server, check_error_object, chunks_of, fold, streamed
from tests.contract.conftest import SCRIPTED
from tests.contract.process import ROOT, ServerProcess, wait_until_ready
from tests.faults.conftest import FLAGS
from tests.faults.raw import completion, connect, is_whole, read_answer, response_of, status

NUM_CLIENTS = 24
SECOND_SIGNAL = (128 + signal.SIGINT, -signal.SIGINT)


@dataclass
class Crowd:
    """Clients that send one request after the other, each on a connection that it keeps while the server does.

    Attributes:
        ends: what became of the requests: "answer", "error in the stream", "503"; "lost" of a request on a connection
            that was kept, which must not be; "turned away" of one on a new connection, which the server did not take.
    """

    server: Server
    fields: dict[str, Any]
    after_503: bool = False  # whether they go on then
    ends: list[str] = field(default_factory=list)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Ends when all of them have ended, which they do when nobody listens any more."""
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            clients = [pool.submit(self._come, index) for index in range(NUM_CLIENTS)]
            yield
            for client in clients:
                client.result(20)

    def _come(self, index: int) -> None:
        while self._stay(completion(**self.fields, stream=index % 2 == 0)):
            pass

    def _stay(self, request: bytes) -> bool:
        """Send requests on one connection; whether to come again."""
        is_kept, end = False, ""
        try:
            with connect(self.server, seconds=60) as connection:
                while end != "503" or self.after_503:
                    connection.sendall(request)
                    received = read_answer(connection)
                    end = _end(received) or ("lost" if is_kept else "turned away")
                    self.ends.append(end)
                    if not is_whole(received) or b"connection: close" in received:
                        return self.after_503 or end != "503"
                    is_kept = True
        except ConnectionRefusedError:
            pass
        except ConnectionError:
            self.ends.append("lost" if is_kept else "turned away")
            return True
        return False


def _end(received: bytes) -> str | None:
    """What became of a request; None where there is no answer, or only a part of one."""
    if not is_whole(received):
        return None
    response = response_of(received)
    if status(received) == 503:
        check_error_object(response.json()["error"], 503)
        return "503"
    assert status(received) == 200
    if b"text/event-stream" not in received:
        return "answer"
    last = chunks_of(response)[-1]
    if "error" not in last:
        return "answer"
    check_error_object(last["error"], 503)
    return "error in the stream"


def check_end(server: Server, codes: tuple[int, ...] = (0,), seconds: float = 30) -> None:
    assert server.process.process.wait(seconds) in codes, server.process.log[-20:]
    server.process.stop()
    assert not any("Traceback" in line for line in server.process.log), server.process.log[-40:]


WORK = {"max_tokens": 60, "ignore_eos": True}


@pytest.mark.slow
@pytest.mark.parametrize("grace", [30, 1])
def test_sigterm_under_load(grace: int) -> None:
    """Eight run, up to sixteen wait; who comes then gets a 503, but for the last eight: they may find nobody."""
    flags = (*FLAGS, "--timeout-graceful-shutdown", str(grace))
    with ServerProcess(*flags) as process, Server(process, "smollm2") as server:
        crowd = Crowd(server, WORK)
        with crowd.at_work():
            numbers = server.wait_for(
                lambda numbers: numbers["requests_finished"]["length"] >= 8 and numbers["waiting"] > 8
            )
            process.process.send_signal(signal.SIGTERM)
        ends = Counter(crowd.ends)
        finished = numbers["requests_finished"]["length"]
        let_in = numbers["running"] + numbers["waiting"]  # for certain; some more may have come since
        assert ends["answer"] >= finished + (let_in if grace == 30 else 0)
        assert bool(ends["error in the stream"]) == (grace == 1)
        assert ends["503"] >= NUM_CLIENTS - 8 and ends["turned away"] <= 8
        assert set(ends) <= {"answer", "503", "error in the stream", "turned away"}
        check_end(server)


@pytest.mark.slow
def test_sigint_twice_under_load() -> None:
    """The first one lets eight run and sixteen wait, the second ends all of it at once."""
    with ServerProcess(*FLAGS) as process, Server(process, "smollm2") as server:
        crowd = Crowd(server, WORK)
        with crowd.at_work():
            server.wait_for(lambda numbers: numbers["running"] == 8 and numbers["waiting"] > 8)
            process.process.send_signal(signal.SIGINT)
            process.wait_for_line("shutting down")
            second = time.monotonic()
            process.process.send_signal(signal.SIGINT)
            check_end(server, SECOND_SIGNAL)
            assert time.monotonic() - second < 5


@pytest.mark.slow
@pytest.mark.parametrize(("grace", "pause"), [(30, 7), (0, 0)], ids=["reads on", "never reads"])
def test_sigterm_while_an_answer_is_read_slowly(grace: int, pause: float) -> None:
    """Bug: who had not read it all 5 s after it was computed lost the rest, whatever the grace period.

    Without one, who does not read at all holds up the end for those 5 s, and no longer.
    """
    flags = ("--timeout-graceful-shutdown", str(grace), "--max-model-len", "10000")
    fields = {"prompt": "<<endless>>", "max_tokens": 8000, "logprobs": 20}
    with (
        ServerProcess(*flags, command=SCRIPTED) as process,
        Server(process, "scripted") as server,
        connect(server, buffer_bytes=1024) as connection,
    ):
        connection.sendall(completion(**streamed(fields)))
        received = connection.recv(1)
        server.wait_until_idle()
        process.process.send_signal(signal.SIGTERM)
        if pause:
            time.sleep(pause)
            answer = fold(response_of(read_answer(connection, received)))
            assert answer.text == "." * 8000
        check_end(server, seconds=10)


def test_a_log_that_nobody_reads(tmp_path: Path) -> None:
    """Bug: when the pipe was full everything stood still, /health as well, and no signal but SIGKILL ended it."""
    reader, writer = os.pipe()
    address = str(tmp_path / "s.sock")
    process = subprocess.Popen([sys.executable, *SCRIPTED, "--uds", address], cwd=ROOT, stderr=writer)
    os.close(writer)
    try:
        transport = httpx.HTTPTransport(uds=address, retries=3)
        with httpx.Client(transport=transport, base_url="http://x", timeout=20) as http:
            wait_until_ready(http)
            for number in range(500):  # a pipe takes 64 KB
                answer = http.post("/v1/completions", json={"prompt": f"<<say {number}>>"})
                assert answer.json()["choices"][0]["text"] == str(number)
            assert http.get("/health").json()["status"] == "ok"
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
    finally:
        process.kill()
        os.close(reader)


def test_clients_that_come_again_at_once() -> None:
    """Bug: connections were kept until the end, and who sent another request down one then lost it."""
    flags = ("--timeout-graceful-shutdown", "1", "--no-access-log")
    with ServerProcess(*flags, command=SCRIPTED) as process, Server(process, "scripted") as server:
        crowd = Crowd(server, {"prompt": "<<say hello>>"}, after_503=True)
        with crowd.at_work(), connect(server) as endless:
            endless.sendall(completion(prompt="<<endless>><<pause 5>>", max_tokens=1000))
            server.wait_for(lambda numbers: numbers["running"] >= 1)
            process.process.send_signal(signal.SIGTERM)
            assert status(read_answer(endless)) == 503
            check_end(server)
        ends = Counter(crowd.ends)
        assert ends["answer"] and ends["503"] > NUM_CLIENTS and ends["turned away"] <= NUM_CLIENTS
        assert set(ends) <= {"answer", "503", "turned away"}
