"""Recordings of what a model computes: the calls of compiled operators, made again without the Python between them.

For few tokens that Python takes as long as the operators do. A recording is made with the largest number of tokens and
requests that it may be replayed with, and computes nothing. It is right whatever its inputs hold, as long as they stay
where they were: operators are kept with the memory that they read and write. Memory that is made while recording comes
from an `Arena`; what is let go there is used again, in the recording as in the computation itself.
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

from miniserve.kernels.layout import round_up
from miniserve.kernels.native import NativeKernels

_CACHE_LINE = 64
_PART_BYTES = 2**20


class Recording:
    """The calls of one computation. Its inputs, and what else it reads, have to outlive it."""

    def __init__(self, kernels: NativeKernels, arena: Arena, name: int, result: Tensor) -> None:
        self._kernels, self._name, self._result = kernels, name, result
        self._arena = arena  # in whose memory the operators write
        weakref.finalize(self, kernels.forget, name).atexit = False

    def replay(self, num_tokens: int, num_requests: int) -> Tensor:
        """Compute from what the first tokens and requests of the inputs hold now.

        Returns:
            [num_tokens, ...], until the next replay.
        """
        self._kernels.replay(self._name, num_tokens, num_requests)
        return self._result[:num_tokens]


class CannotRecordError(Exception):
    """The computation has a part that no compiled operator does, or not for all tokens."""


def record(kernels: NativeKernels, compute: Callable[[], Tensor], *, num_tokens: int, num_requests: int) -> Recording:
    """Run `compute`, and keep the calls that it makes instead of making them.

    Args:
        kernels: whose operators are kept.
        compute: from tensors of `num_tokens` rows to one of as many, each row by itself but for attention.
        num_tokens, num_requests: the largest that it may be replayed with.

    Raises:
        CannotRecordError: it computes something in another way, which replays would leave out.
    """
    arena = Arena()
    kernels.begin_recording(num_tokens, num_requests)
    try:
        with _Watch(kernels, arena):
            result = compute()
    except BaseException:
        kernels.forget(kernels.end_recording())
        raise
    return Recording(kernels, arena, kernels.end_recording(), result)


class Arena:
    """Memory for the tensors of a recording."""

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
    """Sees each operator that PyTorch is to call: gives memory, and refuses what a recording would miss."""

    def __init__(self, kernels: NativeKernels, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernels, self._arena = kernels, arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to keep its compiler away from a mode, torch would import all of it at the first call, for seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.name(), kwargs or {}
        if name == "aten::empty.memory_format":
            return self._arena.empty(tuple(args[0]), kwargs.get("dtype") or torch.get_default_dtype())
        if name == "aten::new_empty":
            return self._arena.empty(tuple(args[1]), kwargs.get("dtype") or args[0].dtype)
        is_end = name.endswith("::forget")  # of another recording, whose object is gone now
        if not func.is_view and not is_end and name not in self._kernels.recorded:
            raise CannotRecordError(f"{name} is no compiled operator")
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:  # such as rows that are no tokens: a replay would not know how many there are
            raise CannotRecordError(f"{name}: {error}") from error
