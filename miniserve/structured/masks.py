"""Masks of what each answer may go on with, computed in the background.

llguidance works without the interpreter lock, so threads do. Knows matchers, not the requests behind them.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from miniserve.structured.compiler import GrammarError, Matcher

logger = logging.getLogger(__name__)

MASK_SECONDS = 2.0
_TOO_LONG = f"its grammar takes more than {MASK_SECONDS:g} s to tell what may come next"
_FAILED = "its grammar failed"

Row = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class MaskQuery:
    """Whose next token has to keep to a grammar.

    Attributes:
        also_allowed: tokens that may come although the grammar does not know them.
        only_those: nothing else may come, whatever the grammar says.
    """

    request_id: str
    matcher: Matcher
    also_allowed: tuple[int, ...] = ()
    only_those: bool = False


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of one step.

    Attributes:
        rows: by request, int32 [ceil(num_token_ids / 32)]; bit i % 32 of word i // 32 is set if token i is allowed.
        errors: why a request has none.
    """

    rows: Mapping[str, Row] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


class PendingMasks:
    """Masks that are being computed, or will be. Until they are there, nothing else may touch the matchers."""

    def __init__(self, worker: MaskWorker, jobs: Sequence[_Job]) -> None:
        self._worker = worker
        self._jobs = jobs
        self._masks: Masks | None = None

    def result(self) -> Masks:
        """Wait for them, each time the same. Those that are not there after `MASK_SECONDS` are given up.

        The matcher of one that is given up must not be used again.
        """
        if self._masks is None:
            self._masks = self._collect() if self._jobs else Masks()
        return self._masks

    def _collect(self) -> Masks:
        if not self._worker.ahead:
            self._worker.compute(self._jobs)
        late = wait([job.row for job in self._jobs], timeout=MASK_SECONDS).not_done
        if late:
            self._worker.close()
        rows, errors = {}, {}
        for job in self._jobs:
            if job.row in late:
                errors[job.query.request_id] = _TOO_LONG
            elif (failure := job.row.exception()) is not None:
                errors[job.query.request_id] = _told(failure)
            else:
                rows[job.query.request_id] = job.row.result()
        return Masks(rows, errors)


class MaskWorker:
    """Computes masks in `num_threads` threads, which start when they are needed first.

    The threads end with it. They are daemons: one that is stuck in a grammar does not hold up the end of the process.

    Attributes:
        ahead: whether masks are computed from `start` on, beside a model that works elsewhere, or once their result is
            asked for. A model on the same cores loses more than the masks take: its threads wait for one another.
    """

    def __init__(self, num_threads: int = 4, *, ahead: bool = True) -> None:
        self.ahead = ahead
        self._num_threads = num_threads
        self._begin()

    def start(self, queries: Sequence[MaskQuery]) -> PendingMasks:
        """Take in what is asked for; nothing is done where nobody asks."""
        jobs = [_Job(query) for query in queries]
        if self.ahead:
            self.compute(jobs)
        return PendingMasks(self, jobs)

    def compute(self, jobs: Sequence[_Job]) -> None:
        """Begin with these."""
        while len(self._threads) < min(len(jobs), self._num_threads):
            self._threads.append(threading.Thread(target=_work, args=(self._jobs,), name="masks", daemon=True))
            self._threads[-1].start()
        for job in jobs:
            self._jobs.put(job)

    def close(self) -> None:
        """Leave the threads to what they are at, or stuck in: then they end. It may be used again, with new ones."""
        self._end()
        self._begin()

    def _begin(self) -> None:
        self._threads: list[threading.Thread] = []
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # None ends a thread
        self._end = weakref.finalize(self, _end, self._threads, self._jobs)


@dataclass(frozen=True, slots=True)
class _Job:
    """A mask to compute, and where it goes."""

    query: MaskQuery
    row: Future[Row] = field(default_factory=Future)


def _end(threads: Sequence[threading.Thread], jobs: SimpleQueue[_Job | None]) -> None:
    with suppress(Empty):  # what none of them has begun is dropped
        while True:
            jobs.get_nowait()
    for _ in threads:
        jobs.put(None)


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    """One thread: job after job."""
    while (job := jobs.get()) is not None:
        try:
            job.row.set_result(_mask(job.query))
        except BaseException as failure:
            job.row.set_exception(failure)


def _mask(query: MaskQuery) -> Row:
    row = np.zeros(query.matcher.num_words, np.int32)
    if not query.only_those:
        query.matcher.fill(row)
    bits = row.view(np.uint32)
    for token_id in query.also_allowed:
        bits[token_id // 32] |= np.uint32(1 << token_id % 32)
    return row


def _told(failure: BaseException) -> str:
    """What the user is told; the rest is for the log."""
    if isinstance(failure, GrammarError):
        return str(failure)
    logger.error("a mask failed", exc_info=failure)
    return _FAILED
