"""Which backend serves: one choice function, whose answer says why what was asked for was passed over."""

from __future__ import annotations

from dataclasses import dataclass

from miniserve.attention.base import AttentionBackend
from miniserve.attention.native import NativeBackend
from miniserve.attention.sdpa import SdpaBackend
from miniserve.attention.torch_ref import TorchBackend


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend class, and the reason when it is not the one that was asked for."""

    backend: type[AttentionBackend]
    reason: str | None = None


def select_backend(
    asked: str, device_type: str, *, no_native: str | None = "there are no native kernels"
) -> BackendChoice:
    """Choose a backend.

    Args:
        asked: auto, native, sdpa, torch or flash_attn.
        device_type: of the device that it runs on.
        no_native: why the native backend cannot serve here; None where it can.
    """
    if asked == "torch":
        return BackendChoice(TorchBackend)
    if asked == "flash_attn":
        cause = "there is no CUDA device" if device_type != "cuda" else "it is not part of this version"
        return BackendChoice(SdpaBackend, f"flash_attn is passed over: {cause}")
    if asked in ("auto", "native") and no_native is None:
        return BackendChoice(NativeBackend)
    return BackendChoice(SdpaBackend, f"native attention is passed over: {no_native}" if asked == "native" else None)
