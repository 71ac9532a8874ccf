"""Tests run in several processes side by side; each computes with one thread, so that none waits for another's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from miniserve.kernels.native import NativeKernels

if "PYTEST_XDIST_WORKER" in os.environ:
    # Read when torch is imported, also by servers that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # where a test asks for two, they do not wait by spinning

# The same examples in every run, so that a red run is the change's own doing. To look for new ones:
# `HYPOTHESIS_PROFILE=explore uv run pytest`.
settings.register_profile("steady", derandomize=True)
settings.register_profile("explore", derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


@pytest.fixture(scope="session")
def native_kernels() -> NativeKernels:
    """The compiled kernels that serve on this machine; compiled by whoever asks first, then in the user's cache."""
    from miniserve import platform
    from miniserve.kernels.load import load

    return load(platform.detect().instruction_sets[0], progress=lambda _line: None)
