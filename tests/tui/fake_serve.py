"""Stands for `main.py serve` in a child: `fake_serve.py MODE FOLDER --host H --port P`.

Writes its process id to FOLDER/pid and is healthy from when FOLDER/healthy exists. MODE: serve; fail, ends at once;
stubborn, does not mind SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main(mode: str, folder: Path, port: int) -> int:
    (folder / "pid.new").write_text(str(os.getpid()))
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "pid.new").rename(folder / "pid")
    sys.stderr.write("weights:  10%\rweights:  50%\r")
    sys.stderr.flush()
    if mode == "fail":
        sys.stderr.write("\nerror: no such model\n")
        return 2

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if (folder / "healthy").exists() else 503)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "tiny"}]}')

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[sys.argv.index("--port") + 1])))
