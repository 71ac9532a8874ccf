"""From a checkpoint and the settled configuration to a runner: the model, its weights, and a KV cache that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from miniserve import platform
from miniserve.attention.base import AttentionBackend
from miniserve.attention.select import select_backend
from miniserve.config import EngineConfig, ResolvedConfig, num_kv_blocks
from miniserve.models.checkpoint import Checkpoint
from miniserve.models.config import ModelConfig
from miniserve.models.loader import init_dummy_weights, load_weights
from miniserve.models.transformer import Transformer
from miniserve.runner.kv_cache import allocate_kv_cache
from miniserve.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """A runner that is ready, and what was found out on the way."""

    runner: ModelRunner
    num_kv_blocks: int
    kv_bytes: int
    num_parameters: int
    backend_name: str
    notes: tuple[str, ...]


def build_runner(
    checkpoint: Checkpoint,
    asked: EngineConfig,
    resolved: ResolvedConfig,
    *,
    num_token_ids: int,
    on_tensor: Callable[[int, int], None] | None = None,
) -> RunnerParts:
    """Load the model and give it a KV cache.

    Raises:
        ModelLoadError: the weights cannot be read or trusted.
        ConfigError: there is no memory for the KV cache.
    """
    device = torch.device(resolved.device)
    dtype: torch.dtype = getattr(torch, resolved.dtype)
    model = Transformer(checkpoint.config, max_positions=resolved.max_model_len, dtype=dtype, device=device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if asked.load_format == "dummy":
        init_dummy_weights(model, seed=resolved.seed or 0)
    else:
        load_weights(model, checkpoint, on_tensor=on_tensor)
    model.pack()
    bytes_per_block = checkpoint.config.kv_elements_per_token * dtype.itemsize * resolved.block_size
    num_blocks = num_kv_blocks(
        asked, resolved, bytes_per_block=bytes_per_block, free_bytes=platform.free_memory(resolved.device)
    )
    caches = allocate_kv_cache(
        checkpoint.config, num_blocks=num_blocks, block_size=resolved.block_size, dtype=dtype, device=device
    )
    backend, notes = _backend(resolved, checkpoint.config)
    runner = ModelRunner(
        model,
        caches,
        backend,
        block_size=resolved.block_size,
        num_token_ids=num_token_ids,
        device=device,
        seed=resolved.seed,
    )
    return RunnerParts(runner, num_blocks, num_blocks * bytes_per_block, num_parameters, backend.name, notes)


def _backend(resolved: ResolvedConfig, config: ModelConfig) -> tuple[AttentionBackend, tuple[str, ...]]:
    choice = select_backend(resolved.attention_backend, resolved.device)
    notes = () if choice.reason is None else (choice.reason,)
    return choice.backend(config.head_dim**-0.5, getattr(torch, resolved.dtype)), notes
