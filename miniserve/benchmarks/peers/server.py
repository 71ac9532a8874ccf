"""The life of one server: started in a process group of its own, waited for, and ended with all that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from miniserve.errors import InternalError

START_SECONDS = 600.0  # vLLM compiles at its first start
STOP_SECONDS = 20.0
_POLL_SECONDS = 0.2
_MAX_LINES = 3  # of a log, in an error


def free_port(host: str) -> int:
    """A port of `host` that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], health_url: str, log: Path) -> Iterator[float]:
    """The server of `command` while the context is open; yields the seconds until it was ready.

    Raises:
        InternalError: it ended, or was not ready in `START_SECONDS`; the message has the end of its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield _wait_until_ready(process, health_url, log)
    finally:
        _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], health_url: str, log: Path) -> float:
    start = time.monotonic()
    while (seconds := time.monotonic() - start) < START_SECONDS:
        if process.poll() is not None:
            raise InternalError(f"the server ended with exit code {process.returncode}: {_tail(log)} (see {log})")
        with suppress(httpx.HTTPError):
            if httpx.get(health_url, timeout=5).status_code == 200:
                return seconds
        time.sleep(_POLL_SECONDS)
    raise InternalError(f"the server was not ready after {START_SECONDS:.0f} s: {_tail(log)} (see {log})")


def _tail(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").split("\n")]
    return " / ".join([line for line in lines if line][-_MAX_LINES:]) or "it said nothing"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """First politely; what is left of the group after `STOP_SECONDS` is killed."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also workers that their parent left behind
    process.wait()
