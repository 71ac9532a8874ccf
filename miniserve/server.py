"""The process around the application: uvicorn, signals, the end.

The port is taken before anything else, so that a port in use is an error at once and not after a model was loaded.
While the engine thread loads, the server answers already, with 503. Does not know what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import uvicorn

from miniserve.config import ServerConfig
from miniserve.engine.async_engine import AsyncEngine
from miniserve.errors import ConfigError
from miniserve.http_protocol import BoundedHttpProtocol
from miniserve.listener import file_limit, listening_socket, raise_file_limit
from miniserve.logs import configure_logging, flush_logs

logger = logging.getLogger("miniserve")

# How long a thread may keep the interpreter from the others, in seconds. A write to a socket gives it away, so with
# Python's 5 ms the event loop would lose that much per chunk to the engine's thread.
SWITCH_INTERVAL = 0.0005
_FLUSH_SECONDS = 5  # for slow readers to take the last chunks after the grace period
_LAST_SECONDS = 0.2  # between the end of listening and the end of connections, for requests that are on their way
_OTHER_FILES = 32  # those that are no connections, generously
_WARN_SECONDS = 60.0  # between two warnings of the same


def serve(app: Any, engine: AsyncEngine, config: ServerConfig, announce: Callable[[str], None]) -> None:
    """Serve `app` until a signal ends it.

    SIGTERM or SIGINT stops admitting, lets what runs finish within the grace period and ends the rest with an error; a
    second signal ends the process at once.

    Args:
        app: the ASGI application. Its lifespan starts and stops `engine`.
        announce: called once with the server's URL when the engine is ready.

    Raises:
        StartupError: the address or the certificate cannot be used, or the engine cannot be built.
    """
    configure_logging(config)
    raise_file_limit()
    sys.setswitchinterval(SWITCH_INTERVAL)
    with listening_socket(config) as listener:
        server = _Server(_uvicorn_config(app, config), engine, config, lambda: announce(_url(config, listener)))
        server.run(sockets=[listener])
    if server.failure is not None:
        raise server.failure
    if engine.is_running:
        # It loads, or is deep in a step: the interpreter's own exit would pull the ground from under native code.
        _exit_at_once(0)


def _exit_at_once(code: int) -> NoReturn:
    flush_logs()
    os._exit(code)


def _url(config: ServerConfig, listener: socket.socket) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    scheme = "http" if config.ssl_certfile is None else "https"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


# uvicorn


def _uvicorn_config(app: Any, config: ServerConfig) -> uvicorn.Config:
    result = uvicorn.Config(
        app,
        loop="auto" if sys.platform == "win32" else "uvloop",
        http=_protocol(config.timeout_request),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=config.access_log,
        server_header=False,
        root_path=config.root_path,
        timeout_keep_alive=config.timeout_keep_alive,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
    )
    try:
        result.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile} with --ssl-keyfile {config.ssl_keyfile} cannot be used: {error}"
        ) from None
    return result


def _protocol(request_seconds: float) -> type[BoundedHttpProtocol]:
    return type("HttpProtocol", (BoundedHttpProtocol,), {"request_seconds": request_seconds})


class _Server(uvicorn.Server):
    """uvicorn's server, which announces a ready engine, ends with a failed one, and drains before it exits."""

    def __init__(
        self, config: uvicorn.Config, engine: AsyncEngine, asked: ServerConfig, announce: Callable[[], None]
    ) -> None:
        super().__init__(config)
        assert issubclass(config.http_protocol_class, BoundedHttpProtocol)
        self._protocol = config.http_protocol_class
        self.failure: BaseException | None = None
        self._engine = engine
        self._grace = float(asked.timeout_graceful_shutdown)
        self._announce = announce
        self._uds = asked.uds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._exiting = False
        self._flush_seconds = float(_FLUSH_SECONDS)
        self._next_warning = 0.0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as `handle_exit` says, and exit with code 0 after a drain."""
        handled = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            handled.append(signal.SIGHUP)
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second exits at once: a thread deep in a step would hold up anything gentler."""
        if self._exiting or self._loop is None:
            if self._uds is not None:
                Path(self._uds).unlink(missing_ok=True)
            logger.warning("second signal: exiting at once")
            _exit_at_once(128 + sig)
        self._exiting = True
        self._loop.call_soon_threadsafe(self._start, self._drain)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, while the engine loads."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._start(self._watch_loading)

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's look at the state of things, ten times a second."""
        limit, now = file_limit(), time.monotonic()
        num_files = len(self.server_state.connections) + _OTHER_FILES
        if limit is not None and num_files >= limit and now >= self._next_warning:
            logger.warning("%d files may be open: new connections are closed; raise the limit (ulimit -n)", limit)
            self._next_warning = now + _WARN_SECONDS
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close what is left: at once where a request has not come in whole, else when the last chunk could go out."""
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        if self.server_state.connections:
            await asyncio.sleep(_LAST_SECONDS)
        for connection in self._connections():
            if connection.cycle is not None and connection.cycle.more_body:
                connection.transport.abort()
        asyncio.get_running_loop().call_later(self._flush_seconds, self._abort_connections)
        await super().shutdown(sockets)

    def _abort_connections(self) -> None:
        for connection in self._connections():
            connection.transport.abort()

    def _connections(self) -> list[BoundedHttpProtocol]:
        return [each for each in self.server_state.connections if isinstance(each, BoundedHttpProtocol)]

    def _start(self, coroutine: Callable[[], Any]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(coroutine()))

    async def _watch_loading(self) -> None:
        try:
            await self._engine.wait_ready()
        except BaseException as error:
            if not self._exiting:
                self.failure = error
            self.should_exit = True
            return
        self._announce()

    async def _drain(self) -> None:
        logger.info("shutting down: requests in progress get %d s; a second signal ends them now", self._grace)
        self._keep_no_connection()
        end = time.monotonic() + self._grace
        try:
            await self._engine.drain(self._grace)
        finally:
            # Whoever has not read all of an answer has what is left of the period as well.
            self._flush_seconds += max(end - time.monotonic(), 0.0)
            self.should_exit = True

    def _keep_no_connection(self) -> None:
        """Answers are their connections' last: whoever sent another request down one would lose it at the end."""
        self._protocol.is_last_request = True
        for connection in self._connections():
            connection.let_go()
