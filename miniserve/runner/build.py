"""From a checkpoint and the settled configuration to a runner: the model, its weights, and a KV cache that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from miniserve import platform
from miniserve.attention.base import AttentionBackend
from miniserve.attention.native import NativeBackend, cannot_serve
from miniserve.attention.select import select_backend
from miniserve.config import EngineConfig, ResolvedConfig, num_kv_blocks
from miniserve.errors import ConfigError
from miniserve.kernels.load import KernelChoice, load_kernels
from miniserve.kernels.native import DTYPES
from miniserve.kernels.quantised import SCHEMES, Grid
from miniserve.models.checkpoint import Checkpoint
from miniserve.models.config import ModelConfig
from miniserve.models.loader import init_dummy_weights, load_weights
from miniserve.models.transformer import Transformer
from miniserve.runner.kv_cache import allocate_kv_cache, kv_bytes_per_block
from miniserve.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """A runner that is ready, and what was found out on the way."""

    runner: ModelRunner
    num_kv_blocks: int
    kv_bytes: int
    num_parameters: int
    backend_name: str
    kernels_name: str
    notes: tuple[str, ...]


def build_runner(
    checkpoint: Checkpoint,
    asked: EngineConfig,
    resolved: ResolvedConfig,
    *,
    num_token_ids: int,
    instruction_sets: tuple[str, ...] = ("portable",),
    on_tensor: Callable[[int, int], None] | None = None,
    on_build: Callable[[str], None] = lambda _line: None,
) -> RunnerParts:
    """Load the model and give it a KV cache.

    Args:
        checkpoint: the model.
        asked, resolved: the settled configuration.
        num_token_ids: how many ids the tokenizer knows.
        instruction_sets: what the native kernels may be compiled for, the best first.
        on_tensor: called after each tensor with (done, total).
        on_build: told that kernels are compiled, which takes a while.

    Raises:
        ModelLoadError: the weights cannot be read or trusted.
        KernelBuildError: native kernels were asked for and cannot be had.
        ConfigError: there is no memory for the KV cache, or no kernels for the quantization of weights or cache.
    """
    device = torch.device(resolved.device)
    dtype: torch.dtype = getattr(torch, resolved.dtype)
    native = _kernels(resolved, dtype, instruction_sets, on_build)
    backend, reason = _backend(resolved, checkpoint.config, native)
    model = Transformer(checkpoint.config, max_positions=resolved.max_model_len, dtype=dtype, device=device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    scheme = SCHEMES.get(resolved.quantization)
    packed = model.packed_modules()

    def pack(module: str, grid: Grid | None) -> None:
        if module in packed:
            model.pack(module, native.kernels, scheme, grid)

    # Module by module: the plain weights are never all in memory at once.
    if asked.load_format == "dummy":
        init_dummy_weights(model, resolved.seed or 0, on_module=pack)
    else:
        keep_grids = model.small_modules() if scheme is not None else frozenset()
        load_weights(model, checkpoint, on_tensor=on_tensor, on_module=pack, keep_grids=keep_grids)
    bytes_per_block = kv_bytes_per_block(checkpoint.config, backend, resolved.block_size)
    num_blocks = num_kv_blocks(
        asked, resolved, bytes_per_block=bytes_per_block, free_bytes=platform.free_memory(resolved.device)
    )
    caches = allocate_kv_cache(
        checkpoint.config, backend, num_blocks=num_blocks, block_size=resolved.block_size, device=device
    )
    runner = ModelRunner(
        model,
        caches,
        backend,
        block_size=resolved.block_size,
        num_token_ids=num_token_ids,
        device=device,
        seed=resolved.seed,
    )
    runner.warm_up()
    return RunnerParts(
        runner,
        num_blocks,
        num_blocks * bytes_per_block,
        num_parameters,
        backend.name,
        "torch" if native.kernels is None else f"native ({native.kernels.instruction_set})",
        tuple(note for note in (native.reason, reason) if note is not None),
    )


def _kernels(
    resolved: ResolvedConfig, dtype: torch.dtype, instruction_sets: tuple[str, ...], on_build: Callable[[str], None]
) -> KernelChoice:
    """The native kernels, where they serve this device and dtype.

    Raises:
        ConfigError: the quantization needs them, and cannot have them.
    """
    if resolved.device == "cpu" and dtype in DTYPES:
        choice = load_kernels(resolved.kernels, instruction_sets, progress=on_build)
    elif resolved.kernels != "native":
        choice = KernelChoice(None)
    else:
        cause = f"the device is {resolved.device}" if resolved.device != "cpu" else f"they have no {resolved.dtype}"
        choice = KernelChoice(None, f"native kernels are passed over: {cause}")
    if resolved.quantization != "none":
        _check_quantization(resolved, choice)
    return choice


def _check_quantization(resolved: ResolvedConfig, choice: KernelChoice) -> None:
    """Weights that were asked to be small are never silently large."""
    flag = f"--quantization {resolved.quantization}"
    if resolved.device != "cpu":
        raise ConfigError(f"{flag} is for CPUs, and the device is {resolved.device}: leave it out, or add --device cpu")
    if choice.kernels is None and getattr(torch, resolved.dtype) not in DTYPES:
        raise ConfigError(f"{flag} needs the native kernels: they have no {resolved.dtype}: add --dtype bfloat16")
    if choice.kernels is None:
        raise ConfigError(f"{flag} needs the native kernels: {choice.reason or 'leave --kernels torch out'}")


def _backend(
    resolved: ResolvedConfig, config: ModelConfig, native: KernelChoice
) -> tuple[AttentionBackend, str | None]:
    """The attention backend, and why it is not the one that was asked for.

    Raises:
        ConfigError: the KV cache's dtype needs the native one, and cannot have it.
    """
    kernels = native.kernels
    no_native = "there are no native kernels" if kernels is None else cannot_serve(resolved.block_size, config.head_dim)
    choice = select_backend(resolved.attention_backend, resolved.device, no_native=no_native)
    cache_dtype = None
    if resolved.kv_cache_dtype == "int8":
        if choice.backend is not NativeBackend:
            remedy = _how_to_get_native(resolved, native, no_native)
            raise ConfigError(f"--kv-cache-dtype int8 needs the native attention: {remedy}")
        cache_dtype = torch.int8
    backend = choice.backend(getattr(torch, resolved.dtype), kernels, cache_dtype)
    return backend, choice.reason


def _how_to_get_native(resolved: ResolvedConfig, native: KernelChoice, no_native: str | None) -> str | None:
    if resolved.device != "cpu":
        return f"the device is {resolved.device}: leave it out, or add --device cpu"
    if resolved.attention_backend not in ("auto", "native"):
        return f"leave --attention-backend {resolved.attention_backend} out"
    if native.kernels is not None:
        return no_native
    if native.reason is not None:
        return native.reason
    return "leave --kernels torch out" if resolved.kernels == "torch" else f"the kernels have no {resolved.dtype}"
