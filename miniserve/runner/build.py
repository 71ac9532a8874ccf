"""From a checkpoint and the settled configuration to a runner: the model, its weights, and a KV cache that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from miniserve import platform
from miniserve.config import EngineConfig, ResolvedConfig, num_kv_blocks
from miniserve.errors import ConfigError, ModelLoadError
from miniserve.kernels.load import KernelChoice, load_kernels
from miniserve.kernels.native import DTYPES
from miniserve.kernels.quantised import SCHEMES, Grid
from miniserve.models.checkpoint import Checkpoint
from miniserve.models.loader import init_dummy_weights, load_weights
from miniserve.models.transformer import Transformer
from miniserve.runner.backend import choose_backend
from miniserve.runner.cuda_graphs import CudaGraphs, GraphRoom
from miniserve.runner.kv_cache import allocate_kv_cache, kv_bytes_per_block
from miniserve.runner.largest_step import largest_step
from miniserve.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """A runner that is ready, and what was found out on the way."""

    runner: ModelRunner
    block_size: int
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
    if device.type == "cuda":
        platform.leave_out_cudnn_attention()
    chosen = choose_backend(asked, resolved, checkpoint.config, native)
    backend, resolved = chosen.backend, replace(resolved, block_size=chosen.block_size)
    model = _empty_model(checkpoint, resolved, dtype, device)
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
    make_runner = partial(
        ModelRunner,
        model,
        backend=backend,
        block_size=resolved.block_size,
        num_token_ids=num_token_ids,
        device=device,
        seed=resolved.seed,
    )
    bytes_per_block = kv_bytes_per_block(checkpoint.config, backend, resolved.block_size)
    allocate = partial(allocate_kv_cache, checkpoint.config, backend, block_size=resolved.block_size, device=device)
    free_bytes = platform.free_memory(resolved.device)
    if resolved.device == "cuda" and asked.num_kv_blocks is None:
        free_bytes -= bytes_of_largest_step(resolved, lambda blocks: make_runner(allocate(num_blocks=blocks)))
    num_blocks = num_kv_blocks(asked, resolved, bytes_per_block=bytes_per_block, free_bytes=max(free_bytes, 0))
    runner = make_runner(allocate(num_blocks=num_blocks))
    runner.warm_up()
    no_graphs = _capture_graphs(runner, resolved, on_build) if resolved.cuda_graphs else None
    return RunnerParts(
        runner,
        resolved.block_size,
        num_blocks,
        num_blocks * bytes_per_block,
        num_parameters,
        backend.label,
        "torch" if native.kernels is None else f"native ({native.kernels.instruction_set})",
        tuple(note for note in (native.reason, chosen.reason, no_graphs) if note is not None),
    )


def _empty_model(
    checkpoint: Checkpoint, resolved: ResolvedConfig, dtype: torch.dtype, device: torch.device
) -> Transformer:
    """Its parameters are there, and unfilled.

    Raises:
        ModelLoadError: there is no memory for them.
    """
    try:
        return Transformer(checkpoint.config, max_positions=resolved.max_model_len, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:  # torch's own errors of memory are RuntimeErrors
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ModelLoadError(f"{checkpoint.path}: the model does not fit into memory: {reason}") from error


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


def bytes_of_largest_step(resolved: ResolvedConfig, make_runner: Callable[[int], ModelRunner]) -> int:
    """What the step that takes the most memory takes on a CUDA device, beside the KV cache; tried out.

    `make_runner` makes a runner with so many KV blocks.

    Raises:
        ConfigError: there is no memory for it.
    """
    step = largest_step(
        num_requests=resolved.max_num_seqs,
        num_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        block_size=resolved.block_size,
    )
    try:
        runner = make_runner(1 + sum(len(item.block_ids) for item in step.scheduled))
        needed = platform.memory_of(lambda: runner.sample(step, runner.execute(step)))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"no room for a step of {step.num_tokens} tokens of {len(step.scheduled)} requests: lower "
            "--max-num-batched-tokens or --max-num-seqs, or free some memory"
        ) from error
    runner.caches = ()  # now, and not when the garbage collector finds the runner, which refers to itself
    return needed


def _capture_graphs(runner: ModelRunner, resolved: ResolvedConfig, on_build: Callable[[str], None]) -> str | None:
    """Make the runner replay decode steps; why not, where that cannot be."""
    obstacle = runner.cannot_capture()
    if obstacle is not None:
        return f"--cuda-graphs is ignored: {obstacle}"
    most_blocks = -(-resolved.max_model_len // resolved.block_size)
    most_requests = min(resolved.max_num_seqs, resolved.max_num_batched_tokens)
    room = GraphRoom(most_requests, most_blocks, resolved.block_size)
    sizes = runner.capture(
        CudaGraphs(), room, on_capture=lambda done, total: on_build(f"capturing CUDA graphs: {done} of {total}")
    )
    return f"CUDA graphs for decode steps of {', '.join(map(str, sizes)) or 'no'} requests"
