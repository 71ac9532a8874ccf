"""The choice of a backend, with a reason whenever it is not what was asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from miniserve.attention.base import AttentionBackend
from miniserve.attention.flash_attn import FLASH_BACKENDS, FlashBackend, PackageFlash, TorchFlash
from miniserve.attention.native import NativeBackend, cannot_serve
from miniserve.attention.sdpa import SdpaBackend
from miniserve.attention.select import select_backend
from miniserve.attention.torch_ref import TorchBackend
from miniserve.config import ATTENTION_BACKENDS


@pytest.mark.parametrize(("asked", "backend"), [("auto", SdpaBackend), ("sdpa", SdpaBackend), ("torch", TorchBackend)])
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_as_asked(asked: str, backend: type[AttentionBackend], device: str) -> None:
    choice = select_backend(asked, device)
    assert choice.backend is backend
    assert (choice.reason is None) == (asked != "auto" or device != "cuda")


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_flash_attn_falls_back_and_says_why(device: str) -> None:
    choice = select_backend("flash_attn", device)
    assert choice.backend is SdpaBackend
    assert choice.reason is not None and "flash_attn" in choice.reason and "CUDA" in choice.reason


@pytest.mark.parametrize("asked", [name for name in ATTENTION_BACKENDS if name not in ("auto", "flash_attn")])
def test_a_backend_is_called_what_the_flag_calls_it(asked: str) -> None:
    choice = select_backend(asked, "cpu", no_native=None)
    assert (choice.backend.name, choice.reason) == (asked, None)


def test_native_is_the_choice_where_it_can_serve() -> None:
    assert select_backend("auto", "cpu", no_native=None).backend is NativeBackend


def test_native_falls_back_and_says_why() -> None:
    choice = select_backend("native", "cpu", no_native="the moon is full")
    assert choice.backend is SdpaBackend
    assert choice.reason == "native attention is passed over: the moon is full"
    assert select_backend("auto", "cpu", no_native="the moon is full").reason is None  # nobody asked


@pytest.mark.parametrize(
    ("block_size", "head_dim", "reason"),
    [(32, 64, None), (96, 512, None), (16, 64, "--block-size 16"), (48, 64, "--block-size 48"), (32, 513, "513")],
)
def test_what_native_cannot_serve(block_size: int, head_dim: int, reason: str | None) -> None:
    answer = cannot_serve(block_size, head_dim)
    assert answer is None if reason is None else answer is not None and reason in answer


def refuse(*refused: type[FlashBackend]) -> Callable[[type[FlashBackend]], str | None]:
    return lambda backend: "the moon is full" if backend in refused else None


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in FLASH_BACKENDS:
        monkeypatch.setattr(backend, "missing", lambda: None)


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize("asked", ["auto", "flash_attn"])
def test_flash_is_the_choice_on_cuda(asked: str) -> None:
    """Torch's own first, then the package's; the answer says why those before were passed over."""
    choice = select_backend(asked, "cuda", no_flash=refuse())
    assert (choice.backend, choice.reason) == (TorchFlash, None)
    choice = select_backend(asked, "cuda", no_flash=refuse(TorchFlash))
    assert choice.backend is PackageFlash
    assert choice.reason == "flash_attn (torch) is passed over: the moon is full"
    choice = select_backend(asked, "cuda", no_flash=refuse(TorchFlash, PackageFlash))
    assert choice.backend is SdpaBackend and choice.reason is not None
    assert [part.partition(" is")[0] for part in choice.reason.split("; ")] == [
        "flash_attn (torch)",
        "flash_attn (flash-attn package)",
    ]


def test_a_library_that_is_not_installed_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[type[FlashBackend]] = []
    monkeypatch.setattr(PackageFlash, "missing", lambda: "it is not installed")
    choice = select_backend("auto", "cuda", no_flash=lambda backend: tried.append(backend) or "no")  # type: ignore[func-returns-value]
    assert tried == [TorchFlash]
    assert choice.reason is not None and choice.reason.endswith("is passed over: it is not installed")
