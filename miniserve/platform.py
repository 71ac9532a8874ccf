"""The only file that asks the hardware: devices, memory, cores, instruction sets. torch is imported when asked."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
# glibc's malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEEP_BELOW_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Machine:
    """What the hardware offers.

    Attributes:
        devices: usable device types, the preferred one first; the last is always cpu.
        physical_cores: cores this process may use, without hyper-threads.
        cpu_has_bf16: whether the CPU multiplies bf16 in hardware (AVX-512 BF16, AMX or Arm's BF16).
        instruction_sets: those of the native kernels that the CPU and the operating system allow, the best one first.
    """

    devices: tuple[str, ...]
    physical_cores: int
    cpu_has_bf16: bool
    instruction_sets: tuple[str, ...] = ("portable",)

    def native_dtype(self, device: str) -> str:
        """The dtype that `auto` means on `device`."""
        if device == "mps":
            return "float16"
        if device == "cuda" or self.cpu_has_bf16:
            return "bfloat16"
        return "float32"


def detect() -> Machine:
    """Ask torch and the operating system."""
    import torch

    devices = []
    if torch.backends.mps.is_available():
        devices.append("mps")
    if torch.cuda.is_available():
        devices.append("cuda")
    return Machine((*devices, "cpu"), _physical_cores(), _cpu_has_bf16(), _instruction_sets())


def free_memory(device: str) -> int:
    """Bytes that an allocation on `device` could take now."""
    import torch

    if device == "cuda":
        free, _total = torch.cuda.mem_get_info()
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # by torch, for the next allocation
        return int(free + kept)
    if device == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return available_ram()


def memory_of(compute: Callable[[], object]) -> int:
    """Bytes that a computation on the CUDA device needs beside what is allocated: the peak of its second run.

    The first one also makes what libraries make only once.
    """
    import torch

    compute()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    compute()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def available_ram() -> int:
    """Bytes of RAM that can be taken without swapping: the machine's, or the container's if that is less.

    A container is charged for the files it has read, such as the weights; that memory is given up when needed.
    """
    import psutil

    available = int(psutil.virtual_memory().available)
    limit, used = _read_int(_CGROUP / "memory.max"), _read_int(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(limit - used + _reclaimable_file_cache(), 0))
    return available


def keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next allocation, where there is glibc.

    By default it gives large buffers back to the system, whose fresh pages then cost a step more than a fifth of its
    time, step after step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEEP_BELOW_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BELOW_BYTES)


def set_threads(threads: int) -> None:
    """Use this many CPU threads for computing, in the whole process."""
    import torch

    torch.set_num_threads(threads)


def leave_out_cudnn_attention() -> None:
    """Let attention on CUDA be computed by kernels that take any shape, in the whole process.

    cuDNN's, which torch prefers on some devices, need a plan for each new shape, which takes long to make; and a step
    rarely has the shape of an earlier one.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def _physical_cores() -> int:
    import psutil

    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, usable))


def _cpu_has_bf16() -> bool:
    import torch

    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    names = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16", "arm_bf16")
    return any(bool(capabilities.get(name)) for name in names) or torch.cpu._is_avx512_bf16_supported()


def _instruction_sets() -> tuple[str, ...]:
    """Which of amx, avx512, avx2 this process may use; portable always. Asks the system for the use of AMX."""
    import torch

    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}

    def has(*names: str) -> bool:
        return all(capabilities.get(name) for name in names)

    avx2 = has("avx2", "fma3", "f16c")
    avx512 = avx2 and has("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_bf16", "avx512_vnni")
    amx = avx512 and has("amx_tile", "amx_bf16", "amx_int8") and torch.cpu._init_amx()
    there = (("amx", amx), ("avx512", avx512), ("avx2", avx2), ("portable", True))
    return tuple(name for name, is_there in there if is_there)


def _reclaimable_file_cache() -> int:
    """Bytes of the container's file cache that were not used lately."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None


def give_back_memory() -> None:
    """Let the allocator return to the system what it keeps although it is free, where it can be asked to (glibc).

    Takes milliseconds for each gigabyte; other threads run meanwhile.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
