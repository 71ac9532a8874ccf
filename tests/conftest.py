"""Tests run in several processes side by side; each computes with one thread, so that none waits for another's."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, also by servers that tests start
