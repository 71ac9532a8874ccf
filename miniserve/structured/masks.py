"""Masks of what each answer may go on with, computed in the background.

llguidance works without the interpreter lock, so threads do. Knows matchers, not the requests behind them.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from miniserve.structured.compiler import GrammarError, Matcher

logger = logging.getLogger(__name__)

MASK_SECONDS = 2.0
_TOO_LONG = f"its grammar takes more than {MASK_SECONDS:g} s to tell what may come next"
GRAMMAR_FAILED = "its grammar failed"

Row = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class MaskQuery:
    """Whose next token has to keep to a grammar.

    Attributes:
        also_allowed: tokens that may come although the grammar does not know them.
        only_those: nothing else may come, whatever the grammar says.
        wants_forced: whether tokens that have to come may come together.
        may_try: whether a token sampled without the mask is, if the mask allows it, as good as one sampled with it.
    """

    request_id: str
    matcher: Matcher
    also_allowed: tuple[int, ...] = ()
    only_those: bool = False
    wants_forced: bool = False
    may_try: bool = False

    def forced(self) -> tuple[int, ...]:
        """The tokens that come next whatever is sampled; none where there is a choice, or each is to come alone."""
        return self.matcher.forced() if self.wants_forced else ()

    def allows(self, token_id: int) -> bool:
        """Whether the mask has this token, without computing it."""
        return token_id in self.also_allowed or (not self.only_those and self.matcher.allows(token_id))


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
        """Wait for them, each time the same. One that takes more than `MASK_SECONDS` is given up.

        The matcher of one that is given up must not be used again.
        """
        if self._masks is None:
            self._masks = self._collect()
        return self._masks

    def _collect(self) -> Masks:
        rows: dict[str, Row] = {}
        errors: dict[str, str] = {}
        jobs = self._jobs
        if not self._worker.ahead:
            self._worker.compute(jobs)
        while jobs:
            left = [job.wait() for job in jobs]
            for job in jobs:
                for query, outcome in zip(job.queries, job.outcomes, strict=False):
                    if isinstance(outcome, BaseException):
                        errors[query.request_id] = _told(outcome)
                    else:
                        rows[query.request_id] = outcome
            errors.update({queries[0].request_id: _TOO_LONG for queries in left if queries})
            jobs = [_Job(queries[1:]) for queries in left if len(queries) > 1]
            if any(left):
                self._worker.close()
                self._worker.compute(jobs)
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
        num_jobs = min(len(queries), self._num_threads)
        jobs = [_Job(queries[first::num_jobs]) for first in range(num_jobs)]
        if self.ahead:
            self.compute(jobs)
        return PendingMasks(self, jobs)

    def compute(self, jobs: Sequence[_Job]) -> None:
        """Begin with these, each in a thread."""
        while len(self._threads) < len(jobs):
            thread = threading.Thread(target=_work, args=(self._jobs,), name="masks", daemon=True)
            thread.start()  # which may fail
            self._threads.append(thread)
        for job in jobs:
            job.begin()
            self._jobs.put(job)

    def close(self) -> None:
        """Leave the threads to what they are at, or stuck in: then they end. It may be used again, with new ones."""
        self._end()
        self._begin()

    def _begin(self) -> None:
        self._threads: list[threading.Thread] = []
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # None ends a thread
        self._end = weakref.finalize(self, _end, self._threads, self._jobs)


class _Job:
    """Masks that one thread computes, one after the other: to hand over each of them would take as long.

    Attributes:
        outcomes: of the first queries, until all have theirs.
    """

    def __init__(self, queries: Sequence[MaskQuery]) -> None:
        self.queries = queries
        self.outcomes: list[Row | BaseException] = []
        self._since = 0.0  # when the mask before was there, or the job was begun
        self._is_given_up = False
        self._lock = threading.Lock()
        self._done = threading.Event()

    def begin(self) -> None:
        """Count the time of the first mask from now on: the model may have run since it was asked for."""
        self._since = time.monotonic()

    def run(self) -> None:
        """Compute them, in the thread whose job it is."""
        while (query := self._next()) is not None:
            try:
                outcome: Row | BaseException = _mask(query)
            except BaseException as failure:
                outcome = failure
            with self._lock:
                if not self._is_given_up:
                    self.outcomes.append(outcome)
                    self._since = time.monotonic()
        self._done.set()

    def wait(self) -> Sequence[MaskQuery]:
        """Until they are there, or one takes too long: that one is returned, and those that were to follow it."""
        while not self._done.wait(max(0.0, self._since + MASK_SECONDS - time.monotonic())):
            with self._lock:
                if time.monotonic() >= self._since + MASK_SECONDS:
                    self._is_given_up = True
                    break
        return self.queries[len(self.outcomes) :]

    def _next(self) -> MaskQuery | None:
        with self._lock:
            if self._is_given_up or len(self.outcomes) == len(self.queries):
                return None
            return self.queries[len(self.outcomes)]


def _end(threads: Sequence[threading.Thread], jobs: SimpleQueue[_Job | None]) -> None:
    with suppress(Empty):  # what none of them has begun is dropped
        while True:
            jobs.get_nowait()
    for _ in threads:
        jobs.put(None)


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    """One thread: job after job."""
    while (job := jobs.get()) is not None:
        job.run()


def _mask(query: MaskQuery) -> Row:
    row = np.zeros(query.matcher.num_words, np.int32)
    if not query.only_those:
        query.matcher.fill(row)
    _allow(row, query.also_allowed)
    return row


def _allow(row: Row, token_ids: Iterable[int]) -> None:
    bits = row.view(np.uint32)
    for token_id in token_ids:
        bits[token_id // 32] |= np.uint32(1 << token_id % 32)


def _told(failure: BaseException) -> str:
    """What the user is told; the rest is for the log."""
    if isinstance(failure, GrammarError):
        return str(failure)
    logger.error("a mask failed", exc_info=failure)
    return GRAMMAR_FAILED
