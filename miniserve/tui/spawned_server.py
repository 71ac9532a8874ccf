"""A server as a child process that does not outlive the chat, and its log.

Owns the process from its start to its end. Does not know when it is healthy, nor what it serves.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from miniserve.tui.errors import ChatError

STOP_SECONDS = 10.0  # for a child to end after SIGTERM, before SIGKILL


class SpawnedServer:
    """A server that `command` starts where `base_url` says. `log` is the file of its stdout and stderr."""

    def __init__(self, command: Sequence[str], base_url: str, api_key: str | None = None) -> None:
        url = urlsplit(base_url)
        self._address = (url.hostname or "", url.port or {"http": 80, "https": 443}[url.scheme])
        self._command = [*command, "--host", self._address[0], "--port", str(self._address[1])]
        # In the environment, because other users can read a command line.
        self._environment = os.environ | ({"MINISERVE_API_KEY": api_key} if api_key else {})
        self._process: subprocess.Popen[bytes] | None = None
        self.log = Path(os.devnull)

    @property
    def pid(self) -> int | None:
        """None before `start`."""
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start it, and return at once. Raises ChatError if something listens there already."""
        with suppress(OSError), socket.create_connection(self._address, timeout=1):
            raise ChatError(f"{self._address} is in use: leave --spawn out, or take another port in --base-url")
        # A dying parent that can stop nobody any more has the kernel send SIGTERM to the child (Linux only).
        prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
        handle, name = tempfile.mkstemp(prefix="miniserve-serve-")
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=handle,
            start_new_session=True,  # the terminal's ctrl+c and hang-up are for us, who end it in order
            preexec_fn=(lambda: prctl(1, signal.SIGTERM)) if prctl else None,  # noqa: PLW1509 -- takes no lock
        )
        os.close(handle)
        self.log = Path(name).rename(Path(name).with_name(f"miniserve-serve-{self._process.pid}.log"))

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to all that it started if that does not help or nobody wants to wait."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def remove_log(self) -> None:
        """Nobody needs the log of a server that ended in order; that of another one is left to be read."""
        if self.exit_code in (0, -signal.SIGTERM):
            self.log.unlink(missing_ok=True)

    def last_lines(self, count: int) -> str:
        """The end of its log, as a terminal would show it: progress bars go back to the start of their line."""
        lines = self.log.read_bytes()[-8192:].decode(errors="replace").split("\n")
        return "\n".join([line.rstrip("\r").rpartition("\r")[2] for line in lines if line.strip()][-count:])

    def obituary(self) -> str:
        """How it ended."""
        return f"the server ended with code {self.exit_code}; its log {self.log} ends with:\n{self.last_lines(12)}"
