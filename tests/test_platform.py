"""What the machine is asked, as far as any machine can tell; containers are played by a folder."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from miniserve import platform
from miniserve.kernels.build import INSTRUCTION_SET_FLAGS
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


AVX2 = {"avx2": True, "fma3": True, "f16c": True}
AVX512 = {**AVX2, **{f"avx512_{name}": True for name in ("f", "bw", "vl", "dq", "bf16", "vnni")}}
AMX = {**AVX512, "amx_tile": True, "amx_bf16": True, "amx_int8": True}


@pytest.mark.parametrize(
    ("capabilities", "amx_allowed", "instruction_sets"),
    [
        (AMX, True, ("amx", "avx512", "avx2", "portable")),
        (AMX, False, ("avx512", "avx2", "portable")),  # the system keeps its registers to itself
        ({**AMX, "avx512_bf16": False}, True, ("avx2", "portable")),
        (AVX512, True, ("avx512", "avx2", "portable")),
        ({**AVX2, "avx512_f": True}, True, ("avx2", "portable")),
        ({**AVX2, "fma3": False}, True, ("portable",)),
        ({}, True, ("portable",)),
    ],
)
def test_instruction_sets(
    monkeypatch: pytest.MonkeyPatch,
    capabilities: dict[str, bool],
    amx_allowed: bool,
    instruction_sets: tuple[str, ...],
) -> None:
    """The best first; one that lacks a part of what its build uses would be an illegal instruction."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: amx_allowed)
    assert platform.detect().instruction_sets == instruction_sets


def test_each_instruction_set_can_be_built() -> None:
    """A name that `build` does not know would end in a KeyError at start."""
    assert set(platform.detect().instruction_sets) <= set(INSTRUCTION_SET_FLAGS)
    assert platform.detect().instruction_sets[-1] == "portable"


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


def test_memory_that_torch_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what earlier steps had left with torch's allocator counted as taken, and graphs were left out."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 7 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5 * GIB)
    assert platform.free_memory("cuda") == 5 * GIB


def test_cores_are_those_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert platform.detect().physical_cores == 3
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    assert platform.detect().physical_cores >= 1


def test_cudnn_attention_is_left_out() -> None:
    assert torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    try:
        platform.leave_out_cudnn_attention()
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_set_threads() -> None:
    before = torch.get_num_threads()
    try:
        platform.set_threads(1)
        assert torch.get_num_threads() == 1
    finally:
        platform.set_threads(before)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the allocator cannot be asked: no glibc")
def test_memory_is_given_back() -> None:
    """What lies under a block that is still in use, the allocator keeps unless it is asked."""
    library, process = ctypes.CDLL(None), psutil.Process()
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    blocks = [library.malloc(4096) for _ in range(25_000)]
    for block in blocks:
        ctypes.memset(block, 1, 4096)
    for block in blocks[:-1]:
        library.free(block)
    before = process.memory_info().rss
    platform.give_back_memory()
    assert before - process.memory_info().rss > 50 * 2**20
    library.free(blocks[-1])
