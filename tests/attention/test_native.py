"""The native backend gives what the oracle gives, from a cache in its own layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from miniserve.attention.base import AttentionVariant, LayerKVCache
from miniserve.attention.native import NativeBackend
from miniserve.attention.torch_ref import TorchBackend
from miniserve.kernels.native import NativeKernels
from tests.attention.steps import GARBAGE, MIXED, STEPS, Step, make_step

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def native_cache(backend: NativeBackend, step: Step) -> LayerKVCache:
    """The step's context in the backend's layout, among garbage; written by itself, as steps before this one do."""
    metadata = step.metadata
    num_blocks, block_size = step.cache.key_values.shape[:2]
    num_kv_heads, head_dim = step.key.shape[1:]
    shape = backend.cache_shape(num_blocks, block_size, num_kv_heads, head_dim)
    cache = LayerKVCache(torch.full(shape, GARBAGE).to(step.query.dtype))
    contexts = [seq - new for new, seq in zip(metadata.query_lens_host, metadata.seq_lens_host, strict=True)]
    before = replace(
        metadata,
        query_start_loc=torch.tensor([0, *accumulate(contexts)], dtype=torch.int32),
        seq_lens=torch.tensor(contexts, dtype=torch.int32),
    )
    key_value = torch.cat(
        [torch.cat((k[:n], v[:n]), dim=1) for k, v, n in zip(step.keys, step.values, contexts, strict=True)]
    )
    query = key_value.new_zeros(len(key_value), *step.query.shape[1:])
    backend.plan(before)(query, key_value, AttentionVariant(scale=1.0), cache)
    return cache


def check(kernels: NativeKernels, step: Step, **options: Any) -> None:
    dtype, variant = step.query.dtype, AttentionVariant(scale=step.query.shape[-1] ** -0.5, **options)
    backend = NativeBackend(dtype, kernels)
    query, key_value = step.query.clone(), step.key_value.clone()
    output = backend.plan(step.metadata)(query, key_value, variant, native_cache(backend, step))
    oracle = TorchBackend(dtype).plan(step.metadata)
    expected: Tensor = oracle(step.query, step.key_value, variant, step.fresh_cache())
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert torch.equal(query, step.query) and torch.equal(key_value, step.key_value)


@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS.keys())
def test_steps(native_kernels: NativeKernels, lengths: tuple[tuple[int, int], ...], block_size: int) -> None:
    check(native_kernels, make_step(lengths, block_size=block_size))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_heads(native_kernels: NativeKernels, dtype: torch.dtype, num_heads: int, num_kv_heads: int) -> None:
    check(native_kernels, make_step(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=32, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 128])
def test_head_dims(native_kernels: NativeKernels, head_dim: int, dtype: torch.dtype) -> None:
    check(native_kernels, make_step(MIXED, head_dim=head_dim, dtype=dtype, block_size=32))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS.keys())
def test_variants(native_kernels: NativeKernels, lengths: tuple[tuple[int, int], ...], dtype: torch.dtype) -> None:
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    for options in ({"window": 5}, {"soft_cap": 2.0}, {"sinks": sinks}, {"window": 5, "soft_cap": 2.0, "sinks": sinks}):
        check(native_kernels, make_step(lengths, block_size=32, dtype=dtype), **options)
