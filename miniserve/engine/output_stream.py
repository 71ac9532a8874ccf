"""What an engine on another thread has to say about some requests, for a reader on the event loop.

Does not know the engine: who owns the stream pushes into it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

from miniserve.engine.engine import ENGINE_FAILED
from miniserve.errors import InternalError, MiniserveError
from miniserve.outputs import EngineOutput, FinishReason


class OutputStream:
    """The outputs of one `submit`: `async with engine.submit(...) as outputs: async for output in outputs: ...`.

    What has come in since the last look is merged, one output per request, so a slow reader costs no more memory than
    the answers themselves. It ends when all requests have ended; leaving it aborts those that have not.

    Raises, while iterating and after everything that came before:
        RequestError: the engine refused a request.
        InternalError: the engine failed on a request.
        EngineUnavailableError: the engine died or is shutting down.
    """

    def __init__(self, request_ids: Iterable[str], abort: Callable[[Sequence[str]], None]) -> None:
        self._unfinished = set(request_ids)
        self._abort = abort
        self._pending: dict[str, EngineOutput] = {}
        self._error: MiniserveError | None = None
        self._closed = False
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._pending.clear()
        if self._unfinished:
            self._abort(list(self._unfinished))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EngineOutput:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._pending.pop(next(iter(self._pending)))

    def ready(self) -> list[EngineOutput]:
        """What else has come in already: for a reader who hands on a whole step's outputs in one piece."""
        outputs = list(self._pending.values())
        self._pending.clear()
        return outputs

    def push(self, output: EngineOutput) -> None:
        """An output of one of its requests; an error ends the stream for all of them."""
        if output.finish_reason is not None:
            self._unfinished.discard(output.request_id)
        if output.finish_reason is FinishReason.ERROR:
            self.fail(InternalError(output.error or ENGINE_FAILED))
        elif self._error is None and not self._closed:
            earlier = self._pending.get(output.request_id)
            self._pending[output.request_id] = output if earlier is None else earlier.merge(output)
        self._changed.set()

    def fail(self, error: MiniserveError) -> None:
        """Let the reader have `error`, after what is pending. The first error stays."""
        if self._error is None:
            self._error = error
        self._changed.set()
