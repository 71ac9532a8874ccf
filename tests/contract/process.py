"""A server in a process of its own, as users start it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

ROOT = Path(__file__).parents[2]
READY = re.compile(r"\[miniserve\] serving (\S+) on (\S+)")
START_SECONDS = 120
LINE_SECONDS = 20


def wait_until_ready(http: httpx.Client) -> None:
    """For a server that does not say where it is: until it serves."""
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up:
        with suppress(httpx.TransportError):
            if http.get("/health").status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError(f"the server was not ready after {START_SECONDS} s")


class ServerProcess:
    """`main.py serve` (or another command that prints the same line) on a free port; ended with the context.

    Attributes:
        url: the base URL, without /v1.
        log: the lines of stderr so far.
    """

    def __init__(self, *flags: str, command: Sequence[str] = ("main.py", "serve")) -> None:
        self.log: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, *command, "--port", "0", *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True, bufsize=1
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))
            if match := READY.search(line):
                self.url = match[2]
                self._ready.set()
        self._ready.set()

    def __enter__(self) -> Self:
        self._ready.wait(START_SECONDS)
        if not self.url:
            self.stop()
            raise AssertionError("the server did not start:\n" + "\n".join(self.log[-20:]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_for_line(self, part: str, seconds: float = LINE_SECONDS) -> str:
        """The first line of the log that contains `part`: a line may come after the answer it is about."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if line := next((line for line in self.log if part in line), None):
                return line
            time.sleep(0.01)
        raise AssertionError(f"no line with {part!r} in the log:\n" + "\n".join(self.log[-20:]))

    def stop(self, seconds: float = 20) -> int:
        """SIGTERM, and SIGKILL if that does not help; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait()
        self._reader.join(5)
        if self.process.stderr is not None:
            self.process.stderr.close()
        return code
