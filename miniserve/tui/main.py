"""One run of the chat: flags, signals, and a spawned server that ends with it. Does not know what is on the screen."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from miniserve.tui.app import ChatApp
from miniserve.tui.errors import ChatError
from miniserve.tui.settings import parse_args
from miniserve.tui.spawned_server import SpawnedServer


def main(serve_command: Sequence[str], arguments: Sequence[str] | None = None) -> int:
    """Chat until the user leaves; the exit code. `serve_command` is what `--spawn` starts, with more flags."""
    settings = parse_args(arguments)
    command = (*serve_command, *settings.serve_args)
    server = SpawnedServer(command, settings.base_url, settings.api_key) if settings.spawn else None
    app = ChatApp(settings, server)
    _end_on_signals(app)
    try:
        if server is not None:
            server.start()
        app.run()
        if server is not None and server.exit_code is not None:
            raise ChatError(server.obituary())  # the screen is gone, and with it what it showed
    except ChatError as error:
        print(f"tui.py: error: {error}", file=sys.stderr)
        return 2
    finally:
        if server is not None:
            server.stop()
    if server is not None:
        server.remove_log()
    return app.return_code or 0


def _end_on_signals(app: ChatApp) -> None:
    """A signal ends the app as ctrl+c does; the program itself where no app runs, or at the second one."""

    def handle(number: int, frame: FrameType | None) -> None:
        loop, app.event_loop = app.event_loop, None
        if loop is None or loop.is_closed():
            raise SystemExit(128 + number)
        loop.call_soon_threadsafe(lambda: app.exit(return_code=128 + number))

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)
