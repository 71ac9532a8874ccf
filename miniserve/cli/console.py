"""What the commands say beside their answers: all of it goes to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 130


def fail(message: str, code: int) -> int:
    """Say what went wrong; returns the exit code."""
    message = " ".join(message.split())  # one line, whatever a library's message was made of
    print(f"miniserve: error: {message}" if code != INTERRUPTED else f"miniserve: {message}", file=sys.stderr)
    return code


def say(line: str) -> None:
    """Tell of the command itself."""
    print(f"[miniserve] {line}", file=sys.stderr, flush=True)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """What is told of the progress, while inside; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
