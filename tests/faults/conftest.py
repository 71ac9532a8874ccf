"""A server that is attacked, and what must hold after every attack.

The embedded model, with native kernels where there is a compiler: a greedy answer is then the same to the bit whatever
else runs, so that one canary prompt tells whether anything was harmed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import psutil
import pytest

from miniserve.engine.input_processor import MAX_CUT_TEXT_LENGTH
from tests.contract.calls import Server
from tests.contract.conftest import SCRIPTED
from tests.contract.process import ServerProcess
from tests.faults.raw import soft_file_limit

REQUEST_SECONDS = 3  # that a client gets to send a request
FLAGS = (
    *("--model", "smollm2", "--max-model-len", "1024", "--num-kv-blocks", "65", "--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "128"),  # a long prompt takes several steps, between which it can be cancelled
    *("--threads", "1"),  # beside other tests, threads that wait for one another take much longer
    *("--max-queued-requests", "600", "--timeout-request", str(REQUEST_SECONDS), "--no-access-log"),
)
KEY = "the-right-one"
FEW_FILES = 256
LIGHT_FLAGS = ("--api-key", KEY, "--max-model-len", "10000")
CANARY: dict[str, Any] = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 12}
MOST_GROWTH = 50 * 2**20
REPORT = "FAULT_REPORT"  # the environment's name for the file that gets a line for each case


@dataclass(frozen=True)
class Target:
    """The server, and how it was before anybody attacked it."""

    server: Server
    golden: str
    process: psutil.Process
    resident_bytes: int
    num_fds: int
    num_threads: int

    def check_unharmed(self) -> None:
        """Healthy, idle, all blocks free, the canary's own text, and no more memory, files and threads than before."""
        assert self.server.http.get("/health").status_code == 200
        self.server.wait_until_idle()
        numbers = self.server.stats()
        assert numbers["kv_blocks_used"] == numbers["running"] == numbers["waiting"] == 0
        assert self.server.post("/v1/completions", **CANARY).json()["choices"][0]["text"] == self.golden
        self._wait_for_files()
        growth = self.process.memory_info().rss - self.resident_bytes
        assert growth < MOST_GROWTH, f"{growth / 2**20:.0f} MB more than before"
        assert self.process.num_threads() <= self.num_threads + 4

    def _wait_for_files(self) -> None:
        """Connections that ended are closed within moments."""
        for _ in range(100):
            if self.process.num_fds() <= self.num_fds + 8:
                return
            sleep(0.1)
        raise AssertionError(f"{self.process.num_fds()} open files, and {self.num_fds} before")


@contextmanager
def attacked(*flags: str) -> Iterator[Target]:
    """The embedded model, warm, which ends in order behind all attacks."""
    with ServerProcess(*FLAGS, *flags) as process, Server(process, "smollm2") as server:
        # What is made once is made, and every block of the cache was written.
        server.complete([[token_id] * 500 for token_id in range(100, 104)], max_tokens=4)
        for _ in range(3):
            server.complete(["Hello"] * 8, max_tokens=40)
            server.chat_stream("Hello", max_tokens=10)
        # The allocator keeps what is freed: what the largest body takes is taken before anything is compared.
        biases = {str(token_id): 1 for token_id in range(10**6)}
        server.post("/v1/completions", prompt="Hi", logit_bias=biases)
        server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}] * 10**5)
        server.post_raw("/v1/completions", b" " * 32 * 2**20)
        with ThreadPoolExecutor(4) as pool:  # each thread of the server's has memory of its own
            for _ in range(8):
                pool.submit(server.post, "/tokenize", prompt="The sea was calm. " * (MAX_CUT_TEXT_LENGTH // 18))
        yield from _until_the_end(server)


def _until_the_end(server: Server) -> Iterator[Target]:
    """The server as it is now; then the end of it."""
    golden = server.post("/v1/completions", **CANARY).json()["choices"][0]["text"]
    system = psutil.Process(server.process.process.pid)
    yield Target(server, golden, system, system.memory_info().rss, system.num_fds(), system.num_threads())
    assert server.process.stop(40) == 0, server.process.log[-20:]
    assert not any("Traceback" in line for line in server.process.log), server.process.log[-40:]


@pytest.fixture(scope="session")
def whole_target() -> Iterator[Target]:
    with attacked() as attacked_target:
        assert "Paris" in attacked_target.golden
        yield attacked_target


@pytest.fixture
def target(whole_target: Target) -> Iterator[Target]:
    """The server, which is checked behind the test."""
    yield whole_target
    whole_target.check_unharmed()


@contextmanager
def attacked_light(*flags: str) -> Iterator[Target]:
    """A model that its prompts direct, behind a key and an access log, started with room for few open files."""
    with soft_file_limit(FEW_FILES):
        process = ServerProcess(*LIGHT_FLAGS, *flags, command=SCRIPTED)
    with process, Server(process, "scripted") as server:
        server.http.headers["Authorization"] = f"Bearer {KEY}"
        for _ in range(3):
            server.complete(["Hello"] * 8, max_tokens=40, logprobs=20)
        yield from _until_the_end(server)


@pytest.fixture(scope="session")
def whole_light() -> Iterator[Target]:
    with attacked_light() as attacked_target:
        yield attacked_target


@pytest.fixture
def light(whole_light: Target) -> Iterator[Target]:
    """The light server, which is checked behind the test."""
    yield whole_light
    whole_light.check_unharmed()


@pytest.fixture(autouse=True)
def reported(request: pytest.FixtureRequest) -> Iterator[None]:
    """Appends the case, its outcome and its time to the report, if one is wanted."""
    start = perf_counter()
    yield
    path = os.environ.get(REPORT)
    if path is None:
        return
    outcome = getattr(request.node, "outcome", "passed")
    line = {"case": request.node.name, "file": request.node.path.stem, "outcome": outcome}
    line |= dict(request.node.user_properties)  # numbers that the case measured
    with Path(path).open("a") as file:
        file.write(json.dumps({**line, "seconds": round(perf_counter() - start, 2)}) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call":
        item.outcome = report.outcome  # type: ignore[attr-defined]
    return report
