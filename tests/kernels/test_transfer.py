"""Arrays to the device in one buffer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from miniserve.kernels.transfer import packed, to_device, unpacked

ARRAYS: dict[str, np.ndarray] = {
    "ids": np.arange(5, dtype=np.int64),
    "lens": np.array([7, -8, 9], np.int32),  # 12 bytes: what follows is not aligned by itself
    "tables": np.arange(6, dtype=np.int64).reshape(3, 2)[:, ::-1],  # not contiguous
    "none": np.empty(0, np.int64),
    "last": np.array([1.5], np.float32),
}


def test_a_buffer_gives_back_what_was_packed() -> None:
    tensors = unpacked(torch.from_numpy(packed(ARRAYS)), ARRAYS)
    assert tensors.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert tensors[name].shape == array.shape
        assert tensors[name].dtype == torch.from_numpy(array.copy()).dtype
        assert np.array_equal(tensors[name].numpy(), array)


def test_it_is_one_transfer() -> None:
    """The tensors of another device are views of one: `meta` stands for it, which has no values but all the rest."""
    tensors = to_device(ARRAYS, torch.device("meta"))
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
    assert [tuple(tensor.shape) for tensor in tensors.values()] == [array.shape for array in ARRAYS.values()]
    assert len({tensor.untyped_storage()._cdata for tensor in tensors.values()}) == 1


@pytest.mark.parametrize("device", ["mps", "meta"])
def test_only_cuda_copies_while_the_host_goes_on(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Bug: MPS read the buffer after it was freed, since nothing but CUDA keeps it for a copy that goes on."""
    waits: list[bool] = []

    def to(self: torch.Tensor, _device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        waits.append(not non_blocking)
        return self

    monkeypatch.setattr(torch.Tensor, "to", to)
    to_device(ARRAYS, torch.device(device))
    assert waits == [True]


def test_on_a_cpu_nothing_is_copied() -> None:
    tensors = to_device({"ids": ARRAYS["ids"]}, torch.device("cpu"))
    assert tensors["ids"].data_ptr() == ARRAYS["ids"].ctypes.data
