"""Faults inside the engine, as clients see them: the request that meets one is told, and nobody else notices anything.

Which call of which part fails is gone through in tests/engine/test_injected_faults.py; here is what goes over the wire.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.calls import COMPLETIONS, Server, check_error, check_error_object, events
from tests.contract.process import ServerProcess
from tests.contract.scripted_server import TOKENIZER_BYTES

FAULTY = ("-m", "tests.faults.faulty_server")
STEP_SECONDS = 1
SAID = "abcdef"


@contextmanager
def faulty(*flags: str) -> Iterator[Server]:
    flags = ("--max-model-len", "4096", "--no-access-log", *flags)
    with ServerProcess(*flags, command=FAULTY) as process, Server(process, "scripted") as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with faulty() as server:
        yield server
        assert server.process.stop(25) == 0, server.process.log[-20:]


def _spelled(at: int, poison: str) -> str:
    return SAID[:at] + poison + SAID[at:]


# What a request asks for, so that its answer is SAID up to token `at`, and there a part fails.
FAULTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "runner": lambda at: {"prompt": f"<<say {SAID}>><<raise {at}>>"},
    "out of memory": lambda at: {"prompt": f"<<say {SAID}>><<memory {at}>>"},
    "sampler": lambda at: {"prompt": f"<<say {SAID}>><<sampler {at}>>"},
    "not finite": lambda at: {"prompt": f"<<say {SAID}>><<error {at}>>"},
    "detokenizer": lambda at: {"prompt": f"<<bytes {_spelled(at, chr(127)).encode().hex()}>>"},
    "grammar": lambda at: {
        "prompt": f"<<bytes {_spelled(at, '~').encode().hex()}>>",
        "structured_outputs": {"regex": "[a-z~]{9}"},
        "logprobs": 0,  # tokens come one by one
    },
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_part_fails_at_a_token(server: Server, fault: str, at: int, stream: bool) -> None:
    asked = {**FAULTS[fault](at), "max_tokens": 20, "stream": stream}
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(server.complete, f"<<say number {n}>><<pause 5>>", max_tokens=30) for n in range(3)]
        response = server.post(COMPLETIONS, **asked)
        assert [future.result().text for future in good] == [f"number {n}" for n in range(3)]
    if stream and at > 0:
        _check_broken_stream(response, SAID[:at])
    else:
        assert "secret" not in check_error(response, 500, "internal_error")
    _check_unharmed(server)


def _check_broken_stream(response: httpx.Response, said: str) -> None:
    """All that came before, then the error, then the end."""
    assert response.status_code == 200
    *chunks, error, done = events(response.text)
    text = "".join(choice["text"] for chunk in chunks for choice in json.loads(chunk)["choices"])
    assert (text, done) == (said, "[DONE]")
    assert json.loads(error)["error"]["code"] == "internal_error"
    check_error_object(json.loads(error)["error"], 500)
    assert "secret" not in error


def _check_unharmed(server: Server) -> None:
    assert server.http.get("/health").json()["status"] == "ok"
    server.wait_until_idle()
    assert server.complete("<<say well>>").text == "well"


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_tokenizer_that_fails_on_a_prompt(server: Server, path: str) -> None:
    assert "secret" not in check_error(server.post(path, prompt="a\x7fb"), 500, "internal_error")
    _check_unharmed(server)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_tokenizer_that_fails_on_an_alternative_of_logprobs(server: Server, stream: bool) -> None:
    """Found only when the answer is written: its neighbour in the vocabulary is one of the most probable tokens."""
    good, neighbour = TOKENIZER_BYTES[ord("a")], TOKENIZER_BYTES[0x7F] - 1
    asked = {"prompt": f"<<ids {good},{neighbour}>>", "logprobs": 3, "max_tokens": 3, "stream": stream}
    response = server.post(COMPLETIONS, **asked)
    if stream:
        _check_broken_stream(response, "a")
    else:
        assert "secret" not in check_error(response, 500, "internal_error")
    _check_unharmed(server)


def test_the_log_tells_what_the_client_is_not_told(server: Server) -> None:
    server.post(COMPLETIONS, prompt="<<sampler 0>>")
    server.process.wait_for_line("a secret of the inside")


# A step that hangs


@pytest.fixture
def watched() -> Iterator[Server]:
    with faulty("--timeout-step", str(STEP_SECONDS)) as server:
        yield server


def _wait_for_status(server: Server, status: str) -> dict[str, Any]:
    give_up = time.monotonic() + 20
    while (health := server.http.get("/health").json())["status"] != status:
        assert time.monotonic() < give_up, health
        time.sleep(0.02)
    found: dict[str, Any] = health
    return found


def test_a_step_that_hangs(watched: Server, tmp_path: Path) -> None:
    """Health is red with the step's age, nobody waits, nobody new is let in; when it goes on, everything does."""
    go = tmp_path / "go"
    with ThreadPoolExecutor(3) as pool:
        streamed = watched.http.stream(
            "POST", COMPLETIONS, json={"prompt": "<<endless>>", "stream": True, "max_tokens": 4000}
        )
        with streamed as response:
            lines = response.iter_text()
            text = next(lines)
            plain = pool.submit(watched.post, COMPLETIONS, prompt=f"<<until {go}>>")
            queued = pool.submit(watched.post, COMPLETIONS, prompt="Hi")
            health = _wait_for_status(watched, "stuck")
            assert health["last_step_age_seconds"] > STEP_SECONDS and "one step" in health["detail"]
            assert watched.http.get("/health").status_code == 503
            text += "".join(lines)
        *_, error, done = events(text)
        assert done == "[DONE]" and json.loads(error)["error"]["code"] == "engine_unavailable"
        for future in (plain, queued):
            assert "one step" in check_error(future.result(), 503, "engine_unavailable")
    check_error(watched.post(COMPLETIONS, prompt="Hi"), 503, "engine_unavailable")
    watched.process.wait_for_line("scripted_server.py")  # where it hangs
    go.touch()
    _wait_for_status(watched, "ok")
    _check_unharmed(watched)
    assert watched.process.stop(25) == 0


@pytest.mark.slow
def test_a_step_that_hangs_for_ever(watched: Server, tmp_path: Path) -> None:
    """SIGTERM ends the process all the same: no grace for whom nobody waits, and none for the thread."""
    never = tmp_path / "never"
    with pytest.raises(AssertionError):
        watched.complete(f"<<until {never}>>")
    start = time.monotonic()
    watched.process.process.send_signal(signal.SIGTERM)
    assert watched.process.process.wait(25) == 0
    assert time.monotonic() - start < 20


def test_clients_that_leave_a_step_that_hangs(watched: Server, tmp_path: Path) -> None:
    """Their requests end when it goes on."""
    go = tmp_path / "go"
    threads = [
        threading.Thread(target=_ask_and_leave, args=(watched, f"<<until {go}>><<endless>>"), daemon=True)
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    go.touch()
    _wait_for_status(watched, "ok")
    _check_unharmed(watched)


def _ask_and_leave(server: Server, prompt: str) -> None:
    with pytest.raises(httpx.TimeoutException):
        httpx.post(server.url + COMPLETIONS, json={"prompt": prompt, "max_tokens": 4000}, timeout=0.4)
