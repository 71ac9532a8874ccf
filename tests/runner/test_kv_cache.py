"""The pool: its shape, its zeros, and that it takes memory only where it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miniserve.attention.base import AttentionBackend
from miniserve.attention.native import NativeBackend
from miniserve.attention.sdpa import SdpaBackend
from miniserve.runner.kv_cache import allocate_kv_cache, kv_bytes_per_block
from tests.runner.tiny import CONFIG, CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_zeros(dtype: torch.dtype) -> None:
    caches = allocate_kv_cache(CONFIG, SdpaBackend(dtype), num_blocks=5, block_size=16, device=CPU)
    assert len(caches) == CONFIG.num_layers
    for tensor in [cache.key_values for cache in caches]:
        assert tensor.shape == (5, 16, 2 * CONFIG.num_kv_heads, CONFIG.head_dim)
        assert tensor.dtype == dtype and tensor.is_contiguous()
        assert not tensor.any()


def test_the_native_layout_pads_heads_to_whole_chunks() -> None:
    [cache, *_] = allocate_kv_cache(CONFIG, NativeBackend(torch.bfloat16), num_blocks=5, block_size=64, device=CPU)
    assert CONFIG.head_dim == 8
    assert cache.key_values.shape == (5, 2, CONFIG.num_kv_heads, 2, 32 * 32)
    assert cache.key_values.dtype == torch.bfloat16 and cache.key_values.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [SdpaBackend, NativeBackend])
def test_bytes_per_block(backend: type[AttentionBackend], dtype: torch.dtype) -> None:
    asked = backend(dtype)
    caches = allocate_kv_cache(CONFIG, asked, num_blocks=3, block_size=32, device=CPU)
    assert 3 * kv_bytes_per_block(CONFIG, asked, 32) == sum(cache.key_values.nbytes for cache in caches)


def test_an_int8_cache_takes_half_the_memory_of_bf16() -> None:
    plain = NativeBackend(torch.bfloat16)
    int8 = NativeBackend(torch.bfloat16, cache_dtype=torch.int8)
    [cache, *_] = allocate_kv_cache(CONFIG, int8, num_blocks=3, block_size=64, device=CPU)
    assert cache.key_values.dtype == torch.int8 and not cache.key_values.any()
    assert 3 * kv_bytes_per_block(CONFIG, int8, 64) == cache.key_values.nbytes * CONFIG.num_layers
    scales = 2 * 64 * CONFIG.num_kv_heads * 4 * CONFIG.num_layers
    assert kv_bytes_per_block(CONFIG, int8, 64) == kv_bytes_per_block(CONFIG, plain, 64) / 2 + scales


def test_a_cpu_cache_begins_with_a_cache_line() -> None:
    """Bug: every line of the cache that the kernels read was parts of two."""
    for cache in allocate_kv_cache(CONFIG, SdpaBackend(torch.float32), num_blocks=99, block_size=64, device=CPU):
        assert cache.key_values.data_ptr() % 64 == 0


def test_layers_share_no_memory() -> None:
    caches = allocate_kv_cache(CONFIG, SdpaBackend(torch.float32), num_blocks=2, block_size=4, device=CPU)
    caches[0].key_values.fill_(1.0)
    assert not caches[1].key_values.any()


GROWTH_OF_THE_PROCESS = """
from dataclasses import replace
import psutil, torch
from miniserve.attention.sdpa import SdpaBackend
from miniserve.runner.kv_cache import allocate_kv_cache
from tests.runner.tiny import CONFIG, CPU

rss = lambda: psutil.Process().memory_info().rss
config = replace(CONFIG, layers=CONFIG.layers[:1], head_dim=64)
backend = SdpaBackend(torch.float32)
before = rss()
[cache] = allocate_kv_cache(config, backend, num_blocks=2**15, block_size=16, device=CPU)
allocated = rss() - before
cache.key_values[: 2**12].fill_(1.0)
print(cache.key_values.nbytes, allocated, rss() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="how memory is counted differs elsewhere")
def test_memory_is_taken_by_use() -> None:
    """Bug: a pool for the worst case, zeroed at once, took all of a small machine's RAM at start.

    In a process of its own: in a used one, freed memory and other threads blur the measure.
    """
    done = subprocess.run(
        [sys.executable, "-c", GROWTH_OF_THE_PROCESS],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    pool, allocated, used = map(int, done.stdout.split())
    assert pool == 2**29
    assert allocated < pool / 16
    assert used > pool / 16  # guard: the measure sees what is used
