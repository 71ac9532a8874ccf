"""Log lines of the server: ours and uvicorn's in one format, to stderr, and nobody waits for whoever reads them."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import QueueHandler
from queue import Full, Queue
from typing import TextIO

from miniserve.config import ServerConfig

MOST_WAITING = 10_000  # lines that nobody has read yet; what comes then is lost, and counted
FLUSH_SECONDS = 1.0  # for a reader to take what waits, at the end


def configure_logging(config: ServerConfig) -> None:
    """Our log lines and uvicorn's."""
    handler = PatientHandler(sys.stderr)
    level = config.log_level.upper()
    access = level if config.access_log else "CRITICAL"
    # uvicorn's own lines of progress say nothing that ours do not.
    uvicorn_level = level if config.log_level in ("debug", "error") else "WARNING"
    for name, its_level in (("miniserve", level), ("uvicorn", uvicorn_level), ("uvicorn.access", access)):
        logger = logging.getLogger(name)
        logger.setLevel(its_level)
        logger.propagate = False
        logger.handlers = [handler]
    logging.getLogger("uvicorn.access").filters = [_without_probes]
    # uvicorn logs an access line for whoever handles it: silence is no handler at all, and costs nothing.
    if not config.access_log:
        logging.getLogger("uvicorn.access").handlers = []


def flush_logs() -> None:
    """Have the lines read that wait, as far as somebody reads them."""
    for handler in logging.getLogger("miniserve").handlers:
        handler.flush()


def _without_probes(record: logging.LogRecord) -> bool:
    """Drop what monitoring asks for every few seconds, and query strings, which may hold secrets."""
    if not isinstance(record.args, tuple) or len(record.args) != 5:
        return True
    client, method, target, version, status = record.args
    path = str(target).partition("?")[0]
    record.args = (client, method, path, version, status)
    return path not in ("/health", "/metrics")


class PatientHandler(QueueHandler):
    """Writes lines in a thread of its own.

    A pipe that nobody reads is full after a few hundred lines: whoever writes to it then stands still, for ever. That
    must be neither the event loop nor the engine's thread. The thread holds no lock while it writes, so that the
    process can end all the same.
    """

    queue: Queue[logging.LogRecord]

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__(Queue(MOST_WAITING))
        self._line = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
        self._write = _writer(stream)
        self._num_lost = 0
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """Without waiting."""
        try:
            self.queue.put_nowait(record)
        except Full:
            self._num_lost += 1

    def flush(self) -> None:
        """Wait until all is written, `FLUSH_SECONDS` at most."""
        give_up = time.monotonic() + FLUSH_SECONDS
        while self.queue.unfinished_tasks and time.monotonic() < give_up:
            time.sleep(0.001)

    def _write_all(self) -> None:
        while True:
            self._write_line(self._line.format(self.queue.get()))
            num_lost, self._num_lost = self._num_lost, 0
            if num_lost:
                self._write_line(f"{num_lost} lines of the log are lost: nobody read them in time")
            self.queue.task_done()

    def _write_line(self, line: str) -> None:
        with suppress(OSError, ValueError):  # closed, or a full disk: there is nobody to tell
            self._write(f"{line}\n")


def _writer(stream: TextIO | None) -> Callable[[str], object]:
    """Writes to what is behind the stream: its buffer has a lock, which the interpreter wants at its end."""
    if stream is None:  # the process was started without one
        return lambda _text: None
    try:
        file = io.FileIO(stream.fileno(), "w", closefd=False)
    except (OSError, ValueError):  # no file of the system's
        return stream.write

    def write(text: str) -> None:
        data = text.encode(errors="backslashreplace")
        while data:
            data = data[file.write(data) or len(data) :]  # None: not now, by one who is never to wait

    return write
