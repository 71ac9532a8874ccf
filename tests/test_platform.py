"""What the machine is asked, as far as any machine can tell; containers are played by a folder."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from miniserve import platform
from miniserve.platform import Machine

GIB = 2**30


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cgroup on a machine with 64 GiB available."""
    monkeypatch.setattr(platform, "_CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    return tmp_path


def limit(container: Path, maximum: str, current: int, inactive_file: int | None = None) -> None:
    (container / "memory.max").write_text(f"{maximum}\n")
    (container / "memory.current").write_text(f"{current}\n")
    if inactive_file is not None:
        (container / "memory.stat").write_text(f"anon 5\nactive_file 7\ninactive_file {inactive_file}\n")


def test_detect() -> None:
    machine = platform.detect()
    assert machine.devices[-1] == "cpu"
    assert ("cuda" in machine.devices) == torch.cuda.is_available()
    assert 1 <= machine.physical_cores <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("device", "cpu_has_bf16", "dtype"),
    [
        ("mps", True, "float16"),
        ("cuda", False, "bfloat16"),
        ("cpu", True, "bfloat16"),
        ("cpu", False, "float32"),
    ],
)
def test_native_dtype(device: str, cpu_has_bf16: bool, dtype: str) -> None:
    assert Machine(("cpu",), 1, cpu_has_bf16).native_dtype(device) == dtype


def test_ram_without_a_container(container: Path) -> None:
    assert platform.available_ram() == platform.free_memory("cpu") == 64 * GIB


def test_ram_in_a_container_without_a_limit(container: Path) -> None:
    limit(container, "max", 3 * GIB)
    assert platform.available_ram() == 64 * GIB


def test_ram_in_a_container(container: Path) -> None:
    limit(container, str(8 * GIB), 3 * GIB)
    assert platform.available_ram() == 5 * GIB


def test_a_container_larger_than_the_machine(container: Path) -> None:
    limit(container, str(1000 * GIB), 3 * GIB)
    assert platform.available_ram() == 64 * GIB


def test_a_container_over_its_limit(container: Path) -> None:
    limit(container, str(2 * GIB), 3 * GIB)
    assert platform.available_ram() == 0


def test_file_cache_is_not_taken_for_used(container: Path) -> None:
    """Bug: the pages of the weights that were just read counted as used, and left no room for the KV cache."""
    limit(container, str(4 * GIB), 4 * GIB, inactive_file=3 * GIB)
    assert platform.available_ram() == 3 * GIB


def test_cores_are_those_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert platform.detect().physical_cores == 3
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    assert platform.detect().physical_cores >= 1


def test_set_threads() -> None:
    before = torch.get_num_threads()
    try:
        platform.set_threads(1)
        assert torch.get_num_threads() == 1
    finally:
        platform.set_threads(before)
