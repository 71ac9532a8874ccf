"""What a step needs on the device goes there in one transfer, from memory that the device itself reads."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 8  # of every array in the buffer: the largest element


def to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The arrays as tensors on `device`. On a CPU they share memory; elsewhere they are views of one buffer."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    buffer = torch.from_numpy(packed(arrays))
    if device.type == "cuda":  # without waiting for the copy: torch keeps pinned memory until it is done
        return unpacked(buffer.pin_memory().to(device, non_blocking=True), arrays)
    return unpacked(buffer.to(device), arrays)


def packed(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """uint8, one array after the other."""
    buffer = np.zeros(sum(_padded(array.nbytes) for array in arrays.values()), np.uint8)
    start = 0
    for array in arrays.values():
        buffer[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += _padded(array.nbytes)
    return buffer


def unpacked(buffer: Tensor, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Tensors with the types and shapes of `arrays`, in what `packed` made of them."""
    tensors: dict[str, Tensor] = {}
    start = 0
    for name, array in arrays.items():
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        tensors[name] = buffer[start : start + array.nbytes].view(dtype).view(array.shape)
        start += _padded(array.nbytes)
    return tensors


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
