"""Masks in the background: whose they are, what else is allowed, and what fails alone."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from miniserve.sampling_params import StructuredOutput
from miniserve.structured import masks as masks_module
from miniserve.structured.compiler import GrammarError
from miniserve.structured.masks import MaskQuery, Masks, MaskWorker
from tests.structured.grammars import Model, allowed


class FakeMatcher:
    """Allows one token; or fails, or waits."""

    num_words = 3

    def __init__(
        self,
        token_id: int = 0,
        failure: BaseException | None = None,
        wait_for: threading.Event | None = None,
    ) -> None:
        self.token_id = token_id
        self.failure = failure
        self.wait_for = wait_for

    def fill(self, row: Any) -> None:
        if self.wait_for is not None:
            assert self.wait_for.wait(60)
        if self.failure is not None:
            raise self.failure
        row.view(np.uint32)[self.token_id // 32] |= np.uint32(1 << self.token_id % 32)


def query(request_id: str, *also_allowed: int, **matcher: Any) -> MaskQuery:
    return MaskQuery(request_id, FakeMatcher(**matcher), also_allowed)  # type: ignore[arg-type]


def ids(row: Any) -> list[int]:
    assert row.dtype == np.int32 and row.shape == (3,)
    return [int(index) for index in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))]


def test_nobody_asks() -> None:
    worker = MaskWorker()
    assert worker.start([]).result() == Masks({}, {})
    assert not worker._threads, "no thread starts for nothing"
    worker.close()


def test_each_request_gets_its_own() -> None:
    worker = MaskWorker()
    pending = worker.start([query("a", token_id=31), query("b", 32, 95, token_id=63), query("c", 31, token_id=0)])
    masks = pending.result()
    assert {request_id: ids(row) for request_id, row in masks.rows.items()} == {
        "a": [31],
        "b": [32, 63, 95],
        "c": [0, 31],
    }
    assert not masks.errors and pending.result() is masks
    worker.close()


def test_masks_are_computed_ahead_or_when_they_are_asked_for() -> None:
    ahead, later = MaskWorker(), MaskWorker(ahead=False)
    pending = ahead.start([query("a", token_id=5)])
    assert not pending._jobs[0].wait() and len(pending._jobs[0].outcomes) == 1
    pending = later.start([query("a", token_id=5)])
    assert not later._threads and later._jobs.empty()
    assert ids(pending.result().rows["a"]) == [5] and pending.result() is pending.result()
    ahead.close()
    later.close()


def test_nothing_else_may_come() -> None:
    worker = MaskWorker()
    query = MaskQuery("a", FakeMatcher(token_id=31), (32, 95), only_those=True)  # type: ignore[arg-type]
    assert ids(worker.start([query]).result().rows["a"]) == [32, 95]
    worker.close()


class Panic(BaseException):
    """As llguidance's own, which is no Exception."""


def test_what_fails_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    worker = MaskWorker(num_threads=1)
    queries = [
        query("a", failure=GrammarError("it is too deep")),
        query("b", token_id=7),
        query("c", failure=RuntimeError("a secret")),
        query("d", failure=Panic("a secret")),
    ]
    with caplog.at_level(logging.ERROR):
        masks = worker.start(queries).result()
    assert {request_id: ids(row) for request_id, row in masks.rows.items()} == {"b": [7]}
    assert masks.errors == {"a": "it is too deep", "c": "its grammar failed", "d": "its grammar failed"}
    assert len(caplog.records) == 2
    worker.close()


def test_what_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And holds up nobody from then on, although its thread is not to be stopped."""
    monkeypatch.setattr(masks_module, "MASK_SECONDS", 0.2)
    worker, release = MaskWorker(num_threads=1), threading.Event()
    stuck = worker.start([query("a", wait_for=release)])
    masks = stuck.result()
    assert set(masks.errors) == {"a"} and "takes more than" in masks.errors["a"]
    monkeypatch.setattr(masks_module, "MASK_SECONDS", 60.0)
    assert ids(worker.start([query("b", token_id=5)]).result().rows["b"]) == [5]
    release.set()
    worker.close()


def test_the_others_of_a_thread_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread computes those that were to follow, and the stuck one leaves them alone when it goes on."""
    monkeypatch.setattr(masks_module, "MASK_SECONDS", 0.2)
    worker, release = MaskWorker(num_threads=1, ahead=False), threading.Event()
    queries = [query("a", token_id=5), query("b", wait_for=release), query("c", token_id=6), query("d", token_id=7)]
    pending = worker.start(queries)
    masks = pending.result()
    assert {request_id: ids(row) for request_id, row in masks.rows.items()} == {"a": [5], "c": [6], "d": [7]}
    assert set(masks.errors) == {"b"}
    release.set()
    assert pending._jobs[0]._done.wait(60)
    assert len(pending._jobs[0].outcomes) == 1
    worker.close()


def test_the_time_of_the_model_is_not_that_of_the_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: behind a step of the model that took longer than a mask may, every mask was given up."""
    monkeypatch.setattr(masks_module, "MASK_SECONDS", 0.5)
    worker = MaskWorker(num_threads=1, ahead=False)
    pending = worker.start([query("a", token_id=5)])
    time.sleep(0.7)
    masks = pending.result()
    assert not masks.errors and ids(masks.rows["a"]) == [5]
    worker.close()


def test_closing_ends_the_threads_and_drops_what_waits() -> None:
    worker, release = MaskWorker(num_threads=1), threading.Event()
    pending = [worker.start([query("a", token_id=5, wait_for=release)]), worker.start([query("b", token_id=6)])]
    [thread] = worker._threads
    while worker._jobs.qsize() > 1:  # until the thread has begun
        time.sleep(0.001)
    worker.close()
    release.set()
    thread.join(60)
    assert not thread.is_alive()
    assert [len(each._jobs[0].outcomes) for each in pending] == [1, 0]
    assert ids(worker.start([query("c", token_id=7)]).result().rows["c"]) == [7]
    worker.close()


def test_the_threads_end_with_a_worker_that_nobody_closed() -> None:
    worker = MaskWorker()
    worker.start([query("a")]).result()
    [thread] = worker._threads
    del worker
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


STUCK = """
import threading
from miniserve.structured import masks
class Matcher:
    num_words = 1
    def fill(self, row): threading.Event().wait()
masks.MASK_SECONDS = 0.01
worker = masks.MaskWorker()
print(worker.start([masks.MaskQuery("a", Matcher())]).result().errors)
"""


def test_a_mask_that_is_stuck_does_not_hold_up_the_end_of_the_process() -> None:
    """Bug: the interpreter waited for the thread, which no signal could end."""
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, check=True, timeout=60)
    assert "takes more than" in ended.stdout


def test_real_masks_of_many_answers_at_once(model: Model) -> None:
    worker = MaskWorker(num_threads=3)
    texts = [f"{letter}{letter}" for letter in "abcdefgh"]
    matchers = [model.compiler.compile(StructuredOutput("regex", text)).start() for text in texts]
    queries = [MaskQuery(text, matcher, (49_151,)) for text, matcher in zip(texts, matchers, strict=True)]
    masks = worker.start(queries).result()
    for text, matcher in zip(texts, matchers, strict=True):
        row = masks.rows[text]
        assert row.shape == (model.tokenizer.num_token_ids // 32,)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        assert set(np.flatnonzero(bits).tolist()) == allowed(matcher) | {49_151}
    worker.close()
