"""The memory of the paged KV cache. Which block belongs to whom is `core`'s business."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from miniserve.attention.base import LayerKVCache
from miniserve.models.config import ModelConfig


def allocate_kv_cache(
    config: ModelConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[LayerKVCache, ...]:
    """One zeroed cache per layer. Zeroed, since a masked slot still takes part as 0 x value: it must not be NaN."""
    shape = (num_blocks, block_size, 2 * config.num_kv_heads, config.head_dim)
    return tuple(LayerKVCache(_zeros(shape, dtype, device)) for _ in range(config.num_layers))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take RAM only once written: the operating system hands out zeroed pages on first touch."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
