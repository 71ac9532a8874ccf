"""An arm of a comparison: a process of its own that loads one engine, and what it measures there.

Neither arm sees the other's memory, threads or settings. This file knows how the parent talks to the process; what is
loaded and measured in it is for `offline` and `hf_baseline`.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from miniserve.errors import InternalError, MiniserveError, RequestError, StartupError

Progress = Callable[[int, int], None]  # (done, total)
MAX_ERROR_CHARS = 500
_REPORT_EVERY = 0.25  # seconds between two reports of progress: drawing them takes time from the measurement


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of an arm over all prompts. Times are seconds from the submission of all requests.

    Attributes:
        prompts: token ids of each prompt, as the engine has read them.
        seconds: until the last request was done.
        first_tokens: until the first token of each request; empty where the arm cannot tell.
        latencies: until the last token of each request.
        completion_tokens: generated tokens, all requests together.
        cached_tokens: prompt tokens that came from a prefix cache.
        padded_prompt_tokens: prompt tokens that were computed, padding included; None for an arm that never pads.
    """

    prompts: tuple[tuple[int, ...], ...]
    seconds: float
    first_tokens: tuple[float, ...]
    latencies: tuple[float, ...]
    completion_tokens: int
    cached_tokens: int = 0
    padded_prompt_tokens: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, without padding."""
        return sum(map(len, self.prompts))


Run = Callable[[Sequence[Any], Progress], Measurement]  # over conversations or token ids, as the arm takes them
Load = Callable[..., Run]  # (progress of loading, arguments of the arm...) -> its run


class Worker:
    """The process of one arm. Waits to be asked; its errors are raised here, with the arm's name.

    Args:
        name: the arm's, for messages.
        load: a function of a module, called in the process.
        arguments: for `load`, after the progress callback.
    """

    def __init__(self, name: str, load: Load, *arguments: object) -> None:
        self._name = name
        self._is_idle = False
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, load, arguments), daemon=True)
        self._process.start()
        theirs.close()  # only the process holds that end now, so its death is seen here as the end of the pipe

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_loaded(self, progress: Progress | None = None) -> None:
        """Once, before the first run.

        Raises:
            MiniserveError: the arm could not be loaded.
        """
        self._receive(progress)

    def run(self, prompts: Sequence[Any], progress: Progress | None = None) -> Measurement:
        """Measure one run over `prompts`.

        Raises:
            MiniserveError: the arm failed.
        """
        self._is_idle = False
        self._pipe.send(list(prompts))
        measurement = self._receive(progress)
        assert isinstance(measurement, Measurement)
        return measurement

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._pipe.close()  # an idle process sees that, and ends in good order
        if not self._is_idle:
            self._process.terminate()
        self._process.join()

    def _receive(self, progress: Progress | None) -> Measurement | None:
        """The next message that is no report of progress."""
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, ConnectionError):
                raise InternalError(f"{self._name}: {self._death()}") from None
            self._is_idle = not isinstance(message, tuple)
            if isinstance(message, MiniserveError):
                raise type(message)(f"{self._name}: {message}")
            if not isinstance(message, tuple):
                return message  # type: ignore[no-any-return]  # what `_work` sends: a measurement, or None when loaded
            if progress is not None:
                progress(*message)

    def _death(self) -> str:
        self._process.join()
        code = self._process.exitcode
        if code == -signal.SIGKILL:
            return "its process was killed, which is what happens when memory runs out; try a smaller model or batch"
        return f"its process ended with exit code {code}"


# In the process


def _work(pipe: Connection, load: Load, arguments: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal interrupts both; the parent ends this one
    with suppress(EOFError, ConnectionError):  # the parent has gone
        try:
            run = load(_reporter(pipe), *arguments)
            pipe.send(None)
            while True:
                pipe.send(run(pipe.recv(), _reporter(pipe)))
        except (EOFError, ConnectionError):
            raise
        except Exception as error:  # the parent says it in one line
            pipe.send(_portable(error))


def _reporter(pipe: Connection) -> Progress:
    """Sends (done, total) to the parent, not too often."""
    next_time = 0.0

    def report(done: int, total: int) -> None:
        nonlocal next_time
        now = time.monotonic()
        if now >= next_time:
            next_time = now + _REPORT_EVERY
            pipe.send((done, total))

    return report


def _portable(error: Exception) -> MiniserveError:
    """An error that can be pickled: other libraries' need not."""
    message = str(error)[:MAX_ERROR_CHARS]
    if isinstance(error, StartupError):
        return StartupError(message)
    if isinstance(error, RequestError):
        return RequestError(message)
    return InternalError(message if isinstance(error, MiniserveError) else f"{type(error).__name__}: {message}")
