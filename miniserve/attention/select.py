"""Which backend serves: one choice function, whose answer says why each other one was passed over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from miniserve.attention.base import AttentionBackend
from miniserve.attention.flash_attn import FLASH_BACKENDS, FlashBackend
from miniserve.attention.native import NativeBackend
from miniserve.attention.sdpa import SdpaBackend
from miniserve.attention.torch_ref import TorchBackend


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend class, and why those that come before it were passed over."""

    backend: type[AttentionBackend]
    reason: str | None = None


def not_tried(_backend: type[FlashBackend]) -> str | None:
    """Where nobody asks the device."""
    return "it was not tried"


def select_backend(
    asked: str,
    device_type: str,
    *,
    no_native: str | None = "there are no native kernels",
    no_flash: Callable[[type[FlashBackend]], str | None] = not_tried,
) -> BackendChoice:
    """Choose a backend.

    Args:
        asked: auto, native, sdpa, torch or flash_attn.
        device_type: of the device that it runs on.
        no_native: why the native backend cannot serve here; None where it can.
        no_flash: the same for FlashAttention of one library; asked only on CUDA.
    """
    if asked == "torch":
        return BackendChoice(TorchBackend)
    passed_over = []
    if asked in ("auto", "native"):
        if no_native is None:
            return BackendChoice(NativeBackend)
        if asked == "native":
            passed_over.append(f"native attention is passed over: {no_native}")
    if asked == "flash_attn" and device_type != "cuda":
        passed_over.append("flash_attn is passed over: there is no CUDA device")
    elif asked in ("auto", "flash_attn") and device_type == "cuda":
        for backend in FLASH_BACKENDS:
            refusal = backend.missing() or no_flash(backend)
            if refusal is None:
                return BackendChoice(backend, "; ".join(passed_over) or None)
            passed_over.append(f"flash_attn ({backend.library}) is passed over: {refusal}")
    return BackendChoice(SdpaBackend, "; ".join(passed_over) or None)
