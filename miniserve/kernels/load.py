"""Which kernels serve: one choice, whose answer says why there are none."""

from __future__ import annotations

import os
from dataclasses import dataclass

from miniserve.errors import ConfigError, KernelBuildError
from miniserve.kernels.build import INSTRUCTION_SET_FLAGS, Progress, build
from miniserve.kernels.native import NativeKernels

# Forces an instruction set, for tests and measurements.
FORCE_VARIABLE = "MINISERVE_INSTRUCTION_SET"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernels, or None and the reason."""

    kernels: NativeKernels | None
    reason: str | None = None


def load_kernels(asked: str, available: tuple[str, ...], *, progress: Progress) -> KernelChoice:
    """The native kernels for this processor, compiled if they are not yet.

    Args:
        asked: auto, native or torch. With auto, kernels that cannot be built are a reason; with native, an error.
        available: the instruction sets that the processor and the system allow, the best one first.
        progress: told what is being compiled.

    Raises:
        KernelBuildError: native kernels were asked for and cannot be had.
        ConfigError: the environment forces an instruction set that is not there.
    """
    if asked == "torch":
        return KernelChoice(None)
    instruction_set = best_instruction_set(available)
    try:
        return KernelChoice(load(instruction_set, progress=progress))
    except KernelBuildError as error:
        if asked == "native":
            raise
        return KernelChoice(None, f"native kernels are passed over: {error}")


def load(instruction_set: str, *, progress: Progress) -> NativeKernels:
    """The kernels for one instruction set.

    Raises:
        KernelBuildError: they cannot be compiled or loaded.
    """
    library = build(instruction_set, progress=progress)
    try:
        return NativeKernels(instruction_set, library.path, library.namespace)
    except OSError as error:
        raise KernelBuildError(
            f"{library.path} cannot be loaded: {error}; delete it, or start with --kernels torch"
        ) from error


def best_instruction_set(available: tuple[str, ...]) -> str:
    """The first of `available`, or the one that the environment forces.

    Raises:
        ConfigError: that one is not there.
    """
    forced = os.environ.get(FORCE_VARIABLE)
    if forced is None:
        return available[0]
    if forced not in INSTRUCTION_SET_FLAGS or forced not in available:
        raise ConfigError(f"${FORCE_VARIABLE} is {forced!r}; this machine has {', '.join(available)}")
    return forced
