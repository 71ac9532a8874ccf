"""`uv run main.py serve | generate | bench | attn-demo | kv-demo`: see `miniserve.cli`."""

from __future__ import annotations

import sys

from miniserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
