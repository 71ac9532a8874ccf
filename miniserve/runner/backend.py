"""Which attention backend a model gets on a device: what each needs to know to say whether it can serve."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from miniserve.attention.base import AttentionBackend, AttentionVariant
from miniserve.attention.flash_attn import FlashBackend
from miniserve.attention.native import NativeBackend, cannot_serve
from miniserve.attention.probe import ProbeShape, why_not
from miniserve.attention.select import select_backend
from miniserve.config import FLASH_BLOCK_SIZE, EngineConfig, ResolvedConfig
from miniserve.errors import ConfigError
from miniserve.kernels.load import KernelChoice
from miniserve.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """The backend, the KV block size that it serves, and why others were passed over."""

    backend: AttentionBackend
    block_size: int
    reason: str | None


def choose_backend(
    asked: EngineConfig, resolved: ResolvedConfig, config: ModelConfig, native: KernelChoice
) -> ChosenBackend:
    """The attention backend.

    Raises:
        ConfigError: the KV cache's dtype needs the native one, and cannot have it.
    """
    kernels = native.kernels
    no_native = "there are no native kernels" if kernels is None else cannot_serve(resolved.block_size, config.head_dim)
    # A larger block shares less, and is taken only where FlashAttention takes no smaller one.
    larger = (FLASH_BLOCK_SIZE,) if resolved.device == "cuda" and asked.block_size is None else ()
    choices = []
    for block_size in (resolved.block_size, *larger):
        choice = select_backend(
            resolved.attention_backend,
            resolved.device,
            no_native=no_native,
            no_flash=partial(no_flash, resolved=resolved, config=config, block_size=block_size),
        )
        choices.append((choice, block_size))
        if issubclass(choice.backend, FlashBackend):
            break
    else:
        choice, block_size = choices[0]
    cache_dtype = None
    if resolved.kv_cache_dtype == "int8":
        if choice.backend is not NativeBackend:
            remedy = _how_to_get_native(resolved, native, no_native)
            raise ConfigError(f"--kv-cache-dtype int8 needs the native attention: {remedy}")
        cache_dtype = torch.int8
    backend = choice.backend(getattr(torch, resolved.dtype), kernels, cache_dtype)
    return ChosenBackend(backend, block_size, choice.reason)


def no_flash(backend: type[FlashBackend], resolved: ResolvedConfig, config: ModelConfig, block_size: int) -> str | None:
    """Why FlashAttention of one library cannot serve the model, or None. It is tried out, on the device."""
    variants = variants_of(config)
    for variant in variants:
        lacking = backend.cannot_attend(variant)
        if lacking is not None:
            return lacking
    shape = ProbeShape(config.num_heads, config.num_kv_heads, config.head_dim, block_size)
    refusal = why_not(backend(getattr(torch, resolved.dtype)), shape, variants, torch.device(resolved.device))
    return None if refusal is None else f"with blocks of {block_size}: {refusal}"


def variants_of(config: ModelConfig) -> list[AttentionVariant]:
    """The kinds of attention that the model's layers have; sinks are zeros."""
    windows = dict.fromkeys(layer.window for layer in config.layers)
    sinks = torch.zeros(config.num_heads) if config.sinks else None
    return [
        AttentionVariant(scale=config.attention_scale, window=window, soft_cap=config.attention_soft_cap, sinks=sinks)
        for window in windows
    ]


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
