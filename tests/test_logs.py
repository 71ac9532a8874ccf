"""Lines of the log: nobody waits for whoever reads them, and none is lost while somebody does."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from miniserve import logs
from miniserve.logs import PatientHandler


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        yield reader, stream
        os.close(reader)


def record(text: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("miniserve", level, __file__, 1, text, None, None)


def lines_of(reader: int) -> list[str]:
    return os.read(reader, 2**20).decode().splitlines()


def test_lines_in_their_order(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    handler = PatientHandler(stream)
    for number in range(100):
        handler.handle(record(f"line {number}"))
    handler.handle(record("a half \ud800", logging.ERROR))
    handler.flush()
    lines = lines_of(reader)
    assert [line.split(" ", 2)[2] for line in lines[:100]] == [f"line {number}" for number in range(100)]
    assert lines[100].endswith("ERROR a half \\ud800")


def test_a_traceback_is_in_it(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    handler = PatientHandler(stream)
    try:
        raise ValueError("broken")
    except ValueError:
        handler.handle(logging.LogRecord("x", logging.ERROR, __file__, 1, "it %s", ("failed",), sys.exc_info()))
    handler.flush()
    first, *_, last = lines_of(reader)
    assert first.endswith("ERROR it failed") and last == "ValueError: broken"


def test_a_pipe_that_nobody_reads(pipe: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: after a few hundred lines the server stood still, and no signal but SIGKILL ended it."""
    monkeypatch.setattr(logs, "MOST_WAITING", 1000)
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 0.1)
    reader, stream = pipe
    handler = PatientHandler(stream)
    for number in range(5000):
        handler.handle(record(f"line {number}" + 100 * "."))
    handler.flush()  # returns all the same
    num_seen = num_lost = 0
    with os.fdopen(os.dup(reader)) as file:
        while num_seen + num_lost < 5000:
            line = file.readline()
            is_loss = "lines of the log are lost" in line
            num_lost += int(line.split()[0]) if is_loss else 0
            num_seen += not is_loss
    assert 2000 < num_lost < 4500


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_where_there_is_no_file(stream: TextIO | None) -> None:
    handler = PatientHandler(stream)
    handler.handle(record("hello"))
    handler.flush()
    assert stream is None or stream.getvalue().endswith("INFO hello\n")  # type: ignore[attr-defined]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
def test_a_disk_that_is_full() -> None:
    with Path("/dev/full").open("w") as stream:
        handler = PatientHandler(stream)
        for _ in range(3):
            handler.handle(record("hello"))
        handler.flush()
        assert not handler.queue.unfinished_tasks
