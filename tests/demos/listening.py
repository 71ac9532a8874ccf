"""A small HTTP server around a handler, for as long as a test needs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Its base URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listener.server_address[1]}/v1"
        listener.shutdown()
        thread.join()
