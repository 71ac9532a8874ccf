"""Every operator is tested on every instruction set that this machine has, in both dtypes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from miniserve import platform
from miniserve.kernels.load import load
from miniserve.kernels.native import NativeKernels


@pytest.fixture(scope="session", params=platform.detect().instruction_sets)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return load(request.param, progress=lambda _line: None)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


@pytest.fixture
def threads_restored() -> Iterator[None]:
    """For tests that compute with another number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
