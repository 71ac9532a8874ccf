"""An arm's process: what it measures arrives, and so do its progress, its errors and its end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest

from miniserve.benchmarks.arm import MAX_ERROR_CHARS, Measurement, Progress, Run, Worker
from miniserve.errors import (
    CheckpointError,
    ContextLengthError,
    InternalError,
    MiniserveError,
    RequestError,
    StartupError,
)


class OddError(Exception):
    """Cannot be pickled: its constructor takes two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and\n{second}")


ERRORS: dict[str, tuple[Exception, type[MiniserveError], str]] = {
    "startup": (CheckpointError("no such file"), StartupError, "this arm: no such file"),
    "request": (ContextLengthError("too long", param="prompt"), RequestError, "this arm: too long"),
    "internal": (InternalError("lost"), InternalError, "this arm: lost"),
    "foreign": (OddError("one", "two"), InternalError, "this arm: OddError: one and\ntwo"),
    "long": (ValueError("x" * 9999), InternalError, "this arm: ValueError: " + "x" * MAX_ERROR_CHARS),
}


def load(progress: Progress, greeting: str) -> Run:
    """An arm that does what its prompts say."""
    progress(1, 3)
    if greeting in ERRORS:
        raise ERRORS[greeting][0]

    def run(prompts: Sequence[Any], progress: Progress) -> Measurement:
        progress(2, 5)
        progress(3, 5)  # too soon after the other to be sent
        match prompts:
            case ["exit"]:
                os._exit(3)
            case ["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["sleep"]:
                time.sleep(1000)
            case [name] if name in ERRORS:
                raise ERRORS[name][0]
        return Measurement(tuple(prompts), 1.5, (), (1.0, 1.5), 7)

    return run


def test_loads_once_and_runs_again_and_again() -> None:
    loading: list[tuple[int, int]] = []
    running: list[tuple[int, int]] = []
    with Worker("this arm", load, "hello") as worker:
        worker.wait_until_loaded(lambda done, total: loading.append((done, total)))
        runs = [
            worker.run(prompts, lambda done, total: running.append((done, total))) for prompts in ([(1, 2)], [(3,)])
        ]
    assert [run.prompts for run in runs] == [((1, 2),), ((3,),)]
    assert [run.prompt_tokens for run in runs] == [2, 1]
    assert runs[0].completion_tokens == 7
    assert loading == [(1, 3)]
    assert set(running) >= {(2, 5)}
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_a_run_arrive_with_the_name_of_the_arm(name: str) -> None:
    _, kind, message = ERRORS[name]
    with Worker("this arm", load, "hello") as worker:
        worker.wait_until_loaded()
        with pytest.raises(kind) as caught:
            worker.run([name])
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < MAX_ERROR_CHARS + 50


def test_errors_of_loading_too() -> None:
    with Worker("this arm", load, "startup") as worker, pytest.raises(StartupError, match="this arm: no such file"):
        worker.wait_until_loaded()


@pytest.mark.parametrize(("how", "message"), [("exit", "exit code 3"), ("kill", "memory")])
def test_a_process_that_dies(how: str, message: str) -> None:
    """Bug: the parent held the process's end of the pipe, and waited for ever."""
    with Worker("this arm", load, "hello") as worker:
        worker.wait_until_loaded()
        with pytest.raises(InternalError, match=f"this arm: .*{message}"):
            worker.run([how])


def test_a_busy_process_ends_with_its_worker() -> None:
    def give_up(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Worker("this arm", load, "hello") as worker:
        worker.wait_until_loaded()
        worker.run(["sleep"], give_up)
    assert not multiprocessing.active_children()
