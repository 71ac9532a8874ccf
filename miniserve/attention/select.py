"""Which backend serves: one choice function, whose answer says why what was asked for was passed over."""

from __future__ import annotations

from dataclasses import dataclass

from miniserve.attention.base import AttentionBackend
from miniserve.attention.sdpa import SdpaBackend
from miniserve.attention.torch_ref import TorchBackend


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend class, and the reason when it is not the one that was asked for."""

    backend: type[AttentionBackend]
    reason: str | None = None


def select_backend(asked: str, device_type: str) -> BackendChoice:
    """The backend for `asked` (auto, sdpa, torch, flash_attn) on a device of type `device_type`."""
    if asked == "torch":
        return BackendChoice(TorchBackend)
    if asked == "flash_attn":
        cause = "there is no CUDA device" if device_type != "cuda" else "it is not part of this version"
        return BackendChoice(SdpaBackend, f"flash_attn is passed over: {cause}")
    return BackendChoice(SdpaBackend)
