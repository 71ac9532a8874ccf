"""Start, overload, shutdown and death: exit codes, what waiting clients get, what the log says.

That an idle server ends at once is checked where the shared ones end, in conftest.py.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.contract.calls import (
    CHAT,
    COMPLETIONS,
    WAIT_SECONDS,
    Answer,
    Server,
    check_error,
    check_error_object,
    events,
    plain,
)
from tests.contract.conftest import SCRIPTED
from tests.contract.process import ROOT, ServerProcess, wait_until_ready

ENDLESS = {"prompt": "<<endless>><<pause 5>>", "max_tokens": 4000}
NAMES = ("draining", "patient", "hasty", "dying")
FLAGS = {
    "draining": ("--timeout-graceful-shutdown", "3"),
}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    """One for each way to end; started together, for most of a start is waiting for the disk and imports."""
    with ExitStack() as stack:
        processes = {name: ServerProcess(*FLAGS.get(name, ()), command=SCRIPTED) for name in NAMES}
        for process in processes.values():
            stack.callback(process.stop)
        for process in processes.values():
            stack.enter_context(process)
        yield {name: stack.enter_context(Server(process, "scripted")) for name, process in processes.items()}


def exit_code(server: Server) -> int:
    """The exit code."""
    return server.process.process.wait(WAIT_SECONDS)


def no_traceback(server: Server) -> bool:
    server.process.stop()
    return not any("Traceback" in line for line in server.process.log)


# Shutdown


def test_sigterm_during_a_stream(servers: dict[str, Server]) -> None:
    """Nothing new is admitted; after the grace period the stream ends as streams end."""
    server = servers["draining"]
    with (
        ThreadPoolExecutor() as pool,
        server.http.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as response,
    ):
        lines = response.iter_text()
        text = next(lines)
        waiting = pool.submit(httpx.post, server.url + COMPLETIONS, json=ENDLESS, timeout=WAIT_SECONDS)
        server.wait_for(lambda numbers: numbers["running"] == 2)
        server.process.process.send_signal(signal.SIGTERM)
        while server.http.get("/health").status_code == 200:
            pass
        check_error(server.post(COMPLETIONS, prompt="Hi"), 503, "engine_unavailable")
        check_error(
            server.post(CHAT, messages=[{"role": "user", "content": "Hi"}], stream=True), 503, "engine_unavailable"
        )
        text += "".join(lines)
    *_, error, done = events(text)
    assert done == "[DONE]"
    check_error_object(json.loads(error)["error"], 503)
    assert json.loads(error)["error"]["code"] == "engine_unavailable"
    check_error(waiting.result(), 503, "engine_unavailable")
    assert exit_code(server) == 0
    assert no_traceback(server)


def test_sigterm_lets_what_runs_finish(servers: dict[str, Server]) -> None:
    """Bug: a body that was sent in half held up the end, and then made a traceback and a false 500."""
    server = servers["patient"]
    half_sent = socket.create_connection((server.http.base_url.host, server.http.base_url.port or 80))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    half_sent.sendall(head)
    with (
        half_sent,
        server.http.stream(
            "POST", COMPLETIONS, json={"prompt": "<<pause 20>><<say a whole answer>>", "max_tokens": 50, "stream": True}
        ) as response,
    ):
        lines = response.iter_text()
        text = next(lines)
        server.process.process.send_signal(signal.SIGTERM)
        text += "".join(lines)
    *datas, done = events(text)
    parts = [json.loads(data)["choices"][0] for data in datas]
    assert done == "[DONE]" and parts[-1]["finish_reason"] == "stop"
    assert "".join(part["text"] for part in parts) == "a whole answer"
    assert exit_code(server) == 0
    assert no_traceback(server)


def test_a_second_signal_ends_at_once(servers: dict[str, Server]) -> None:
    """Though the grace period is 30 s, and the step takes for ever."""
    server = servers["hasty"]
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(COMPLETIONS, json={"prompt": "<<until /nowhere>>"}, timeout=0.5)
    with server.http.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True, "prompt": "<<until /never>>"}):
        server.process.process.send_signal(signal.SIGTERM)
        while server.http.get("/health").status_code == 200:
            pass
        server.process.process.send_signal(signal.SIGINT)
        assert server.process.process.wait(25) in (128 + signal.SIGINT, -signal.SIGINT)


# Overload


def test_a_full_queue(guarded: Server, tmp_path: Path) -> None:
    """Two run, two wait; the fifth is told to come again, and nothing happens to the others."""
    server, go = guarded, tmp_path / "go"
    prompt = f"<<until {go}>><<say done>>"
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(_until_let_in, server, prompt) for _ in range(4)]
        try:
            server.wait_for(lambda numbers: numbers["running"] + numbers["waiting"] >= 1)
            refused = _refusal(server, prompt)
            for response in (refused, server.post(CHAT, messages=[{"role": "user", "content": "Hi"}], stream=True)):
                check_error(response, 429, "queue_full")
                assert int(response.headers["retry-after"]) >= 1
            assert server.http.get("/health").status_code == 200
        finally:
            go.touch()
        assert [call.result().text for call in calls] == ["done"] * 4
    server.wait_until_idle()
    assert server.complete("Hi").text == "Hi"


def _until_let_in(server: Server, prompt: str) -> Answer:
    """The answer. Whoever asks for a refusal may have taken the place for a moment."""
    for _ in range(100):
        response = server.post(COMPLETIONS, prompt=prompt)
        if response.status_code != 429:
            return plain(response)
        time.sleep(0.1)
    raise AssertionError("never let in")


def _refusal(server: Server, prompt: str) -> httpx.Response:
    """Ask until the queue is full; whoever is let in before goes away again."""
    for _ in range(100):
        try:
            response = server.http.post(COMPLETIONS, json={"prompt": prompt}, timeout=2)
        except httpx.ReadTimeout:
            continue
        return response
    raise AssertionError("never refused")


def test_a_prompt_that_can_never_fit_the_cache(guarded: Server) -> None:
    """Bug kind: 49 blocks and prompts of 63 blocks: waited for ever, health green."""
    server = guarded
    for _ in range(5):
        response = server.post(COMPLETIONS, prompt="x" * (63 * 16), max_tokens=1)
        message = check_error(response, 400, "context_length_exceeded")
        assert str(63 * 16) in message
    assert server.complete("Hi").text == "Hi"


def test_more_than_the_cache_holds_at_once(guarded: Server) -> None:
    """Two requests that grow beyond the cache together: one is preempted, both answers are whole."""
    server = guarded
    texts = [letter * 300 for letter in "ab"]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda text: server.complete(f"<<say {text}>>", max_tokens=400), texts))
    assert [answer.text for answer in answers] == texts
    assert [answer.num_tokens for answer in answers] == [301, 301]
    server.wait_until_idle()
    assert server.stats()["preemptions"] >= 1


# Death


def test_a_dead_engine(servers: dict[str, Server]) -> None:
    """Whoever waits is told, health is red, new requests are refused, and the process still ends in order."""
    server = servers["dying"]
    with (
        ThreadPoolExecutor() as pool,
        server.http.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as response,
    ):
        lines = response.iter_text()
        text = next(lines)
        plain = pool.submit(server.post, COMPLETIONS, **ENDLESS)
        server.wait_for(lambda numbers: numbers["running"] == 2)
        check_error(server.post(COMPLETIONS, prompt="<<die 2>>"), 503, "engine_unavailable")
        check_error(plain.result(), 503, "engine_unavailable")
        text += "".join(lines)
    *_, error, done = events(text)
    assert done == "[DONE]" and json.loads(error)["error"]["code"] == "engine_unavailable"
    health = server.http.get("/health")
    assert health.status_code == 503 and health.json()["status"] == "dead"
    check_error(server.post(COMPLETIONS, prompt="Hi"), 503, "engine_unavailable")
    for path in ("/stats", "/metrics", "/v1/models", "/version"):
        assert server.http.get(path).status_code in (200, 503)
    server.process.process.send_signal(signal.SIGTERM)
    assert server.process.process.wait(25) == 0


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no such signal here")
@pytest.mark.parametrize("ignored", [False, True], ids=["drains", "nohup"])
def test_a_terminal_that_goes_away(ignored: bool) -> None:
    """As SIGTERM, unless whoever started it wants it to stay."""
    deaf = "import signal, runpy; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    code = f"{deaf}; runpy.run_module({SCRIPTED[1]!r}, None, '__main__')"
    command = ("-c", code) if ignored else SCRIPTED
    with ServerProcess(command=command) as process, Server(process, "scripted") as server:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.complete, "<<say abc>><<pause 50>>", max_tokens=5)
            server.wait_for(lambda numbers: numbers["running"] == 1)
            process.process.send_signal(signal.SIGHUP)
            assert asked.result().text == "abc"
        if ignored:
            assert server.complete("<<say abc>>").text == "abc"
            assert process.stop() == 0
        assert exit_code(server) == 0


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-", ">&- 2>log"])
def test_without_standard_files(closed: str, tmp_path: Path) -> None:
    """Bug: sockets got their numbers, and the end of the server was an assertion of a library."""
    address, log = tmp_path / "s.sock", tmp_path / "log"
    line = f"exec {sys.executable} {' '.join(SCRIPTED)} --uds {address} {closed.replace('log', str(log))}"
    process = subprocess.Popen(["sh", "-c", line], cwd=ROOT)
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(address)), base_url="http://x") as http:
            wait_until_ready(http)
            assert http.post(COMPLETIONS, json={"prompt": "<<say abc>>"}).json()["choices"][0]["text"] == "abc"
        process.send_signal(signal.SIGTERM)
        assert process.wait(25) == 0
    finally:
        process.kill()
        process.wait()


# Start


def serve(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "main.py", "serve", *flags], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    """Exit code 2 and one line about why."""
    assert result.returncode == 2 and result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("miniserve")
    return line


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = one_line(serve("--model", "smollm2", "--port", str(port)))
    assert str(port) in line and "--port" in line


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    name = str(tmp_path / "nothing.gguf")
    assert "nothing.gguf" in one_line(serve("--model", name, "--port", "0"))
