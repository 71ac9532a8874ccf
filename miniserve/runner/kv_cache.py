"""The memory of the paged KV cache. Which block belongs to whom is `core`'s business."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from miniserve.attention.base import AttentionBackend, LayerKVCache
from miniserve.kernels.layout import zeros
from miniserve.models.config import ModelConfig


def allocate_kv_cache(
    config: ModelConfig, backend: AttentionBackend, *, num_blocks: int, block_size: int, device: torch.device
) -> tuple[LayerKVCache, ...]:
    """One zeroed cache per layer, in the backend's layout.

    Zeroed, since a masked slot still takes part as 0 x value: it must not be NaN.
    """
    shape = backend.cache_shape(num_blocks, block_size, config.num_kv_heads, config.head_dim)
    return tuple(LayerKVCache(_zeros(shape, backend.cache_dtype, device)) for _ in range(config.num_layers))


def kv_bytes_per_block(config: ModelConfig, backend: AttentionBackend, block_size: int) -> int:
    """Memory that one block takes, over all layers."""
    shape = backend.cache_shape(1, block_size, config.num_kv_heads, config.head_dim)
    return prod(shape) * backend.cache_dtype.itemsize * config.num_layers


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, zeros that take RAM only once written: the operating system hands out zeroed pages on first touch."""
    return zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
