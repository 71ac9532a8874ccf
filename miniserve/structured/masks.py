"""Masks of what each answer may go on with, computed in the background while the model runs.

llguidance works without the interpreter lock, so threads do. Knows matchers, not the requests behind them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

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
    """

    request_id: str
    matcher: Matcher
    also_allowed: tuple[int, ...] = ()


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
    """Masks that are being computed. Until they are there, nothing else may touch the matchers."""

    def __init__(self, worker: MaskWorker, futures: Mapping[str, Future[Row]]) -> None:
        self._worker = worker
        self._futures = futures
        self._masks: Masks | None = None

    def result(self) -> Masks:
        """Wait for them, each time the same. Those that are not there after `MASK_SECONDS` are given up.

        The matcher of one that is given up must not be used again.
        """
        if self._masks is None:
            self._masks = self._collect() if self._futures else Masks()
        return self._masks

    def _collect(self) -> Masks:
        late = wait(self._futures.values(), timeout=MASK_SECONDS).not_done
        if late:
            self._worker.renew()
        rows, errors = {}, {}
        for request_id, future in self._futures.items():
            if future in late:
                errors[request_id] = _TOO_LONG
            elif (failure := future.exception()) is not None:
                errors[request_id] = _told(failure)
            else:
                rows[request_id] = future.result()
        return Masks(rows, errors)


class MaskWorker:
    """Computes masks in `num_threads` threads, which start when they are needed first."""

    def __init__(self, num_threads: int = 4) -> None:
        self._num_threads = num_threads
        self._threads = self._new_threads()

    def start(self, queries: Sequence[MaskQuery]) -> PendingMasks:
        """Begin to compute the masks; nothing is done where nobody asks."""
        return PendingMasks(self, {query.request_id: self._threads.submit(_mask, query) for query in queries})

    def renew(self) -> None:
        """Leave the threads to what they are stuck in, and go on with new ones."""
        self.close()
        self._threads = self._new_threads()

    def close(self) -> None:
        """Let the threads end when they are done."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _new_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._num_threads, thread_name_prefix="masks")


def _mask(query: MaskQuery) -> Row:
    row = np.zeros(query.matcher.num_words, np.int32)
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
