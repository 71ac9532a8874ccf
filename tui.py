"""`uv run tui.py`: chat in the terminal with any OpenAI-compatible server; see `miniserve.tui`."""

from __future__ import annotations

import sys
from pathlib import Path

from miniserve.tui.main import main

SERVE_COMMAND = (sys.executable, str(Path(__file__).with_name("main.py")), "serve")  # what --spawn starts

if __name__ == "__main__":
    sys.exit(main(SERVE_COMMAND))
