"""Recordings of what a model computes: the calls of compiled operators, made again without the Python between them.

For a single token that Python takes as long as the operators do. A recording is right whatever its inputs hold, as long
as they stay where they were: operators are kept with the memory that they read and write. Memory that is made while
recording comes from an `Arena`; what is let go there is used again, in the recording as in the computation itself.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from miniserve.kernels.native import NativeKernels, round_up

_CACHE_LINE = 64
_PART_BYTES = 2**20


class Recording:
    """The calls of one computation, and the tensor in which its result is after each `replay`.

    Its inputs, and what else it reads, have to outlive it.
    """

    def __init__(self, kernels: NativeKernels, arena: Arena, name: int, result: Tensor) -> None:
        self.result = result
        self._kernels, self._name = kernels, name
        self._arena = arena  # in whose memory the operators write
        weakref.finalize(self, kernels.forget, name).atexit = False

    def replay(self) -> Tensor:
        """Compute again, from what the inputs hold now."""
        self._kernels.replay(self._name)
        return self.result


class CannotRecordError(Exception):
    """The computation has a part that no compiled operator does."""


def record(kernels: NativeKernels, arena: Arena, compute: Callable[[], Tensor]) -> Recording:
    """Run `compute` once, and keep the calls that it makes.

    Raises:
        CannotRecordError: it computes something in another way, which replays would leave out.
    """
    watch = _Watch(kernels, arena)
    kernels.begin_recording()
    try:
        with watch:
            result = compute()
    except BaseException:
        kernels.forget(kernels.end_recording())
        raise
    recording = Recording(kernels, arena, kernels.end_recording(), result)
    if watch.foreign is not None:
        raise CannotRecordError(f"{watch.foreign} is no compiled operator")
    return recording


class Arena:
    """Memory for the tensors of recordings that never run at the same time."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        self._left = 0  # bytes at the end of the last part
        self._free: dict[int, list[int]] = {}  # addresses by size in bytes

    @property
    def num_bytes(self) -> int:
        """Memory taken so far."""
        return sum(part.nbytes for part in self._memory)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `torch.empty`, on the CPU. The memory comes back when the last tensor over it is gone."""
        num_elements = prod(shape)
        num_bytes = round_up(max(num_elements * dtype.itemsize, 1), _CACHE_LINE)
        free = self._free.setdefault(num_bytes, [])
        address = free.pop() if free else self._take(num_bytes)
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        weakref.finalize(memory, free.append, address).atexit = False
        return torch.frombuffer(memory, dtype=dtype)[:num_elements].view(shape)

    def _take(self, num_bytes: int) -> int:
        if num_bytes > self._left:
            self._left = max(num_bytes, _PART_BYTES)
            self._memory.append(torch.empty(self._left + _CACHE_LINE, dtype=torch.uint8))
        part = self._memory[-1]
        address = part.data_ptr() + part.nbytes - _CACHE_LINE - self._left
        self._left -= num_bytes
        return round_up(address, _CACHE_LINE)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operator that PyTorch calls: gives memory, and finds what a recording would miss."""

    def __init__(self, kernels: NativeKernels, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.foreign: str | None = None
        self._kernels, self._arena = kernels, arena

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name() in ("aten::empty.memory_format", "aten::new_empty"):
            size = args[0] if func.name() == "aten::empty.memory_format" else args[1]
            dtype = (kwargs or {}).get("dtype") or (args[0].dtype if isinstance(args[0], Tensor) else None)
            return self._arena.empty(tuple(size), dtype or torch.get_default_dtype())
        result = func(*args, **(kwargs or {}))
        if func.name() not in self._kernels.recorded and not _is_view(func, args, result):
            self.foreign = self.foreign or func.name()
        return result


def _is_view(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether nothing was computed: the result is its argument's memory, unchanged."""
    if func._schema.is_mutable or not isinstance(result, Tensor) or not args or not isinstance(args[0], Tensor):
        return False
    return result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
