"""The engine on a thread of its own, for callers on an event loop.

Two sides, one writer each. The engine thread builds the engine and steps it; the event loop owns the streams and the
status. Commands go over in an inbox, which the thread empties before every step and blocks on when it has no work.
Outputs come back in one call per step. So nobody polls, an abort takes effect within one step, and nothing on the loop
ever waits for the engine. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miniserve.core.request import Request
from miniserve.engine.engine import ENGINE_FAILED, Engine
from miniserve.engine.health import DETAILS, STUCK, EngineStatus, Health
from miniserve.engine.metrics import MetricsHook
from miniserve.engine.output_stream import OutputStream
from miniserve.engine.prometheus import PrometheusMetrics
from miniserve.engine.request_log import RequestLog
from miniserve.engine.stats import EngineStats
from miniserve.errors import (
    EngineUnavailableError,
    InternalError,
    InvalidParameterError,
    QueueFullError,
    RequestError,
    StartupError,
)
from miniserve.outputs import EngineOutput

if TYPE_CHECKING:
    from miniserve.engine.build import EngineParts

logger = logging.getLogger(__name__)

WATCH_SECONDS = 1.0  # between two looks at the age of a step
STOP_SECONDS = 10.0  # how long `stop` waits for the step that is being computed


@dataclass(frozen=True, slots=True)
class _Add:
    """Queue these requests, the choices of each prompt together; all or none."""

    prompts: Sequence[Sequence[Request]]
    arrival: float


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Stop:
    """End the thread."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """These requests never came into the engine, or left it at once."""

    request_ids: Sequence[str]
    error: RequestError | InternalError


_Command = _Add | _Abort | _Stop


class AsyncEngine:
    """One engine, its thread, and what the event loop may ask of them. All methods belong to the event loop.

    Args:
        build: makes the engine, on its thread; gets the hooks that the engine must call.
        model_name: what clients call the model; the label of all metrics.
        max_queued_requests: requests that may wait beyond those that can run at once. A prompt with n choices is n.
        stuck_after: seconds without the end of a step after which the engine counts as stuck: nothing is admitted, and
            nobody is left waiting for it. When the step ends after all, it serves again.
    """

    def __init__(
        self,
        build: Callable[[Sequence[MetricsHook]], EngineParts],
        *,
        model_name: str,
        max_queued_requests: int = 1024,
        stuck_after: float = 300.0,
    ) -> None:
        self.stats = EngineStats(model_name)
        self.metrics = PrometheusMetrics(model_name)
        self._build = build
        self._max_queued_requests = max_queued_requests
        self._stuck_after = stuck_after
        self._status = EngineStatus.LOADING
        self._failure: BaseException | None = None  # what `wait_ready` raises
        self._parts: EngineParts | None = None
        self._streams: dict[str, OutputStream] = {}  # by request id: exactly those whose end has not come back yet
        self._built = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended = asyncio.Event()
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._step_start: float | None = None  # written by the thread, between steps; None: there is no work
        self._last_look = self._awake_since = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # What callers use

    def start(self) -> None:
        """Start the thread, which builds the engine and then serves this event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._watch(was_stuck=False)

    async def wait_ready(self) -> None:
        """Return when the engine can be used.

        Raises:
            StartupError: or whatever else `build` raised.
            EngineUnavailableError: it was stopped before that.
        """
        await self._built.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def parts(self) -> EngineParts:
        """The engine and what belongs to it.

        Raises:
            EngineUnavailableError: it is not there yet, or not any more.
        """
        if self._parts is None or self._status not in (EngineStatus.READY, EngineStatus.DRAINING):
            raise EngineUnavailableError(DETAILS[self._status])
        return self._parts

    def health(self) -> Health:
        """How the engine is. Never waits for it."""
        age = self._step_age()
        if self._status is EngineStatus.READY and age > self._stuck_after:
            return Health(STUCK, False, age, f"the engine has been busy with one step for {age:.0f} s")
        status = self._status
        return Health(status.value, status is EngineStatus.READY, age, DETAILS.get(status))

    def check_admission(self) -> None:
        """Refuse early what `submit` would refuse anyway, whatever the request.

        Raises:
            EngineUnavailableError: the engine is loading, shutting down, stuck or dead.
            QueueFullError: too many requests wait.
        """
        health = self.health()
        if not health.healthy:
            raise EngineUnavailableError(health.detail or health.status)
        self._check_room(1)

    def submit(self, prompts: Sequence[Sequence[Request]]) -> OutputStream:
        """Hand requests to the engine.

        Args:
            prompts: for each prompt its choices, as `InputProcessor.choices` makes them.

        Returns:
            The stream of all their outputs. What only the engine finds wrong with a request is raised there.

        Raises:
            EngineUnavailableError, QueueFullError: as `check_admission`.
            InvalidParameterError: a request id is in use, or these choices are more than ever fit at once.
        """
        self.check_admission()
        request_ids = _ids(prompts)
        self._check_room(len(request_ids))
        if taken := self._streams.keys() & set(request_ids):
            raise InvalidParameterError(f"request id {min(taken)!r} is in use", param="request_id")
        assert len(set(request_ids)) == len(request_ids), "each choice has an id of its own"
        stream = OutputStream(request_ids, self._abort)
        self._streams.update(dict.fromkeys(request_ids, stream))
        self._idle.clear()
        self._inbox.put(_Add(prompts, time.perf_counter()))
        return stream

    async def drain(self, grace: float) -> None:
        """Take no new requests, and return when all have ended; those left after `grace` seconds are failed."""
        if self.health().status == STUCK:  # nobody waits any more
            grace = 0.0
        if self._status in (EngineStatus.LOADING, EngineStatus.READY):
            self._status = EngineStatus.DRAINING
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace)
        if not self._idle.is_set():
            logger.warning("%d requests did not end within %g s, and are aborted", len(self._streams), grace)
            self._fail_streams(DETAILS[EngineStatus.DRAINING])
            self._abort(list(self._streams))

    async def stop(self) -> None:
        """End the thread after its current step. Whoever still waits gets an `EngineUnavailableError`."""
        is_loading = not self._built.is_set()
        if self._status is not EngineStatus.DEAD:
            self._status = EngineStatus.STOPPED
        self._fail_streams(DETAILS[EngineStatus.STOPPED])
        self._idle.set()
        if is_loading:
            self._failure = EngineUnavailableError(DETAILS[EngineStatus.STOPPED])
            self._built.set()
        self._inbox.put(_Stop())
        # Loading cannot be interrupted, and may take minutes: the thread is a daemon, and ends with the process.
        if is_loading or not self._thread.is_alive():
            return
        try:
            await asyncio.wait_for(self._ended.wait(), STOP_SECONDS)
        except TimeoutError:
            logger.warning("the engine's current step does not end; leaving it behind")
        else:
            self._thread.join()  # it said so with its last line

    @property
    def is_running(self) -> bool:
        """Whether the thread is still there: after `stop`, one that loads, or is deep in a step."""
        return self._thread.is_alive()

    # On the event loop, called by the streams and by the thread

    def _abort(self, request_ids: Sequence[str]) -> None:
        """The streams stay known until the engine has confirmed the end: until then, the ids are in use."""
        self._inbox.put(_Abort(request_ids))

    def _check_room(self, num_new: int) -> None:
        room = self._max_queued_requests + self.parts.engine.scheduler.max_num_seqs
        if num_new > room:
            raise InvalidParameterError(
                f"these are {num_new} choices, and this server takes {room} at once: send fewer prompts or a smaller n",
                param="n",
            )
        if len(self._streams) + num_new > room:
            raise QueueFullError(
                f"{len(self._streams)} requests run or wait, and at most {self._max_queued_requests} may wait: "
                "try again later"
            )

    def _watch(self, *, was_stuck: bool) -> None:
        """Now and then, until the engine ends: see that nobody waits for a step that does not end."""
        assert self._loop is not None
        if self._status in (EngineStatus.STOPPED, EngineStatus.DEAD):
            return
        self._notice_sleep()
        self._last_look = time.monotonic()
        health = self.health()
        is_stuck = health.status == STUCK
        if is_stuck and not was_stuck:
            self._on_stuck(health.detail or health.status)
        elif was_stuck and not is_stuck:
            logger.warning("the step has ended after all: serving again")
        self._loop.call_later(
            min(WATCH_SECONDS, self._stuck_after / 4), functools.partial(self._watch, was_stuck=is_stuck)
        )

    def _notice_sleep(self) -> None:
        """A process that was stopped for a while, or its machine, has done no step meanwhile, and nothing is stuck."""
        now = time.monotonic()
        if now - self._last_look > 2 * WATCH_SECONDS:
            self._awake_since = now

    def _on_stuck(self, detail: str) -> None:
        stack = sys._current_frames().get(self._thread.ident or 0)
        where = "".join(traceback.format_stack(stack)) if stack is not None else "its thread has ended"
        logger.critical("%s: %d requests fail. It is at:\n%s", detail, len(self._streams), where)
        self._fail_streams(detail)

    def _step_age(self) -> float:
        start = self._step_start
        if start is None:
            return 0.0
        self._notice_sleep()
        return time.monotonic() - max(start, self._awake_since)

    def _on_built(self, parts: EngineParts) -> None:
        self._parts = parts
        self.stats.bind(parts, self._step_age)
        self.metrics.bind(parts.engine)
        if self._status is EngineStatus.LOADING:
            self._status = EngineStatus.READY
        self._built.set()

    def _on_outputs(self, outputs: Sequence[EngineOutput], refusals: Sequence[_Refusal]) -> None:
        for output in outputs:
            ended = output.finish_reason is not None
            stream = self._streams.pop(output.request_id) if ended else self._streams[output.request_id]
            try:
                stream.push(output)
            except Exception:  # whose other outputs, and everybody else's, must not be lost with it
                logger.exception("an output of request %s failed, and it ends", output.request_id)
                stream.fail(InternalError(ENGINE_FAILED))
        for refusal in refusals:
            for request_id in refusal.request_ids:
                self._streams.pop(request_id).fail(refusal.error)
        if not self._streams:
            self._idle.set()

    def _on_dead(self, error: BaseException) -> None:
        if not self._built.is_set():
            self._failure = error
            self._built.set()
        if self._status is not EngineStatus.STOPPED:
            self._status = EngineStatus.DEAD
        self._fail_streams(DETAILS[self._status])
        self._streams.clear()
        self._idle.set()

    def _fail_streams(self, reason: str) -> None:
        for stream in set(self._streams.values()):
            stream.fail(EngineUnavailableError(reason))

    # On the engine thread

    def _run(self) -> None:
        try:
            parts = self._build((self.stats, self.metrics, RequestLog()))
            self._call(self._on_built, parts)
            with contextlib.closing(parts.engine):
                self._serve(parts.engine)
        except BaseException as error:
            if not isinstance(error, StartupError):  # that one is the caller's to show
                logger.critical("the engine has failed", exc_info=error)
            self._step_start = None
            self._call(self._on_dead, error)
        self._call(self._ended.set)

    def _serve(self, engine: Engine) -> None:
        """Commands, then a step, for ever."""
        while True:
            outputs: list[EngineOutput] = []
            refusals: list[_Refusal] = []
            for command in self._take_commands(wait=not engine.has_work):
                match command:
                    case _Add():
                        refusals += _add(engine, command)
                    case _Abort():
                        aborted = (engine.abort(request_id) for request_id in command.request_ids)
                        outputs += [output for output in aborted if output is not None]
                    case _Stop():
                        return
            outputs += engine.step()
            # Before the outputs go over: who sees the last of them must find an idle engine.
            self._step_start = time.monotonic() if engine.has_work else None
            if outputs or refusals:
                self._call(self._on_outputs, outputs, refusals)

    def _take_commands(self, *, wait: bool) -> list[_Command]:
        """What the inbox has. With `wait`, at least one command: the thread sleeps until somebody sends one."""
        commands: list[_Command] = []
        if wait:
            commands.append(self._inbox.get())
            self._step_start = time.monotonic()
        while True:
            try:
                commands.append(self._inbox.get_nowait())
            except queue.Empty:
                return commands

    def _call(self, function: Callable[..., object], *args: object) -> None:
        """Have the event loop call `function`."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop is closed: nobody is left to be told
            self._inbox.put(_Stop())


def _add(engine: Engine, command: _Add) -> list[_Refusal]:
    """Queue all requests of a submission, or none: a refusal takes back those that were queued before it."""
    queued: list[str] = []
    try:
        for choices in command.prompts:
            engine.add(choices[0], choices[1:], arrival=command.arrival)
            queued += _ids([choices])
    except (RequestError, InternalError) as error:
        for request_id in queued:
            engine.abort(request_id)
        return [_Refusal(_ids(command.prompts), error)]
    return []


def _ids(prompts: Sequence[Sequence[Request]]) -> list[str]:
    return [request.request_id for choices in prompts for request in choices]
