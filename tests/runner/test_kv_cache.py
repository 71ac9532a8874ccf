"""The pool: its shape, its zeros, and that it takes memory only where it is used."""

from __future__ import annotations

import sys
from dataclasses import replace

import psutil
import pytest
import torch

from miniserve.runner.kv_cache import allocate_kv_cache
from tests.runner.tiny import CONFIG, CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_zeros(dtype: torch.dtype) -> None:
    caches = allocate_kv_cache(CONFIG, num_blocks=5, block_size=16, dtype=dtype, device=CPU)
    assert len(caches) == CONFIG.num_layers
    for tensor in [cache.key_values for cache in caches]:
        assert tensor.shape == (5, 16, 2 * CONFIG.num_kv_heads, CONFIG.head_dim)
        assert tensor.dtype == dtype and tensor.is_contiguous()
        assert not tensor.any()


def test_layers_share_no_memory() -> None:
    caches = allocate_kv_cache(CONFIG, num_blocks=2, block_size=4, dtype=torch.float32, device=CPU)
    caches[0].key_values.fill_(1.0)
    assert not caches[1].key_values.any()


@pytest.mark.skipif(sys.platform != "linux", reason="how memory is counted differs elsewhere")
def test_memory_is_taken_by_use() -> None:
    """Bug: a pool for the worst case, zeroed at once, took all of a small machine's RAM at start."""
    config = replace(CONFIG, num_layers=1, head_dim=64)
    process = psutil.Process()
    before = process.memory_info().rss
    [cache] = allocate_kv_cache(config, num_blocks=2**15, block_size=16, dtype=torch.float32, device=CPU)
    pool = cache.key_values.nbytes
    assert pool == 2**29
    assert process.memory_info().rss - before < pool / 16
    cache.key_values[: 2**12].fill_(1.0)
    assert process.memory_info().rss - before > pool / 16  # guard: the measure sees what is used
