"""A KV cache of int8: attention over what it holds, and that a token's result stays its own."""

from __future__ import annotations

from math import inf, nan, prod
from typing import Any

import pytest
import torch

from miniserve.kernels import reference
from miniserve.kernels.layout import cache_shape
from miniserve.kernels.native import NativeKernels
from tests.kernels.paged import CONTEXT, LENGTHS, UNCHANGED, Pool, Span, check, in_chunks, make_requests, whole

# Queries and probabilities are whole numbers of 15 bits.
TOLERANCE = 5e-4
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 40, "soft_cap": 5.0, "qk_norm": True, "rotary_dim": 24},
    {"window": 40, "sinks": True},
    {"num_heads": 6, "num_kv_heads": 2, "head_dim": 80, "block_size": 64},
    {"num_heads": 16, "num_kv_heads": 1, "head_dim": 16},
    {"num_heads": 17, "num_kv_heads": 1, "head_dim": 33, "rotary_dim": 32},
    {"num_heads": 2, "num_kv_heads": 1, "head_dim": 512},
    {"head_dim": 128, "rotary_dim": 96, "qk_norm": True, "sinks": True, "window": 33},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attention_over_what_is_stored(kernels: NativeKernels, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Prompts, chunks and decodes in one step. Without rotation a key is the same to the bit here and there."""
    fixed = {"dtype": dtype, "int8": True}
    unchanged = {"rotary_dim": 0, "qk_norm": False}
    check(kernels, make_requests(LENGTHS, **{**fixed, **options, **unchanged}), fp32_tolerance=TOLERANCE)
    # Else a rounding difference can make it the next whole number.
    check(kernels, make_requests(LENGTHS, **{**fixed, **options}), fp32_tolerance=5e-3)


@pytest.mark.parametrize("window", [1, 31, 33, 70, 256, 257, 300, 1000])
def test_windows(kernels: NativeKernels, dtype: torch.dtype, window: int) -> None:
    requests = make_requests(LENGTHS, dtype=dtype, int8=True, window=window, rotary_dim=0)
    check(kernels, requests, fp32_tolerance=TOLERANCE)


def test_a_single_token_gets_its_own_value(kernels: NativeKernels) -> None:
    """Also where all of it is 0, or very small or large."""
    requests = make_requests([1] * 4, dtype=torch.float32, int8=True, rotary_dim=0)
    for heads, factor in zip(requests.heads, (1.0, 0.0, 1e-30, 1e30), strict=True):
        heads[:, 6:] *= factor
    pool = Pool(kernels, requests)
    for heads, output in zip(requests.heads, pool.attend(*((request, 0, 1) for request in range(4))), strict=True):
        stored = reference.as_int8(heads[:, 6:]).repeat_interleave(2, dim=1)
        torch.testing.assert_close(output, stored, atol=0, rtol=1e-6)


def test_every_whole_number(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """Values from -127 to 127 have the scale 1, and come back as they are."""
    requests = make_requests([1], dtype=dtype, int8=True, head_dim=256, rotary_dim=0)
    numbers = torch.arange(-128, 128).clamp_min(-127).to(dtype)
    requests.heads[0][:, 6:] = numbers
    [output] = Pool(kernels, requests).attend((0, 0, 1))
    assert torch.equal(output, numbers.expand(1, 4, 256))


@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize("options", OPTIONS[:5], ids=["plain", "all", "sinks", "gqa", "mqa"])
def test_the_same_whole_or_in_chunks_alone_or_together(
    kernels: NativeKernels, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    requests = make_requests(LENGTHS, dtype=dtype, int8=True, **options)
    torch.set_num_threads(1)
    expected = whole(kernels, requests)
    for threads, size in ((1, 300), (1, 64), (2, 33), (3, 100)):
        torch.set_num_threads(threads)
        for one, alone in zip(in_chunks(kernels, requests, size), expected, strict=True):
            assert torch.equal(one, alone), (threads, size)


@pytest.mark.parametrize("broken", [nan, inf, -inf])
@pytest.mark.parametrize("part", ["key", "value"])
def test_what_is_not_finite_reaches_who_sees_it_and_nobody_else(
    kernels: NativeKernels, dtype: torch.dtype, part: str, broken: float
) -> None:
    """Not even tokens before it in the same step: what is stored is finite, only a scale is not."""
    requests = make_requests([50, 60], dtype=dtype, int8=True, rotary_dim=0)
    clean = whole(kernels, requests)
    requests.heads[0][37, {"key": 4, "value": 6}[part], 3] = broken
    first, other = Pool(kernels, requests).attend((0, 0, 50), (1, 0, 60))
    assert torch.equal(first[:37], clean[0][:37]) and torch.equal(other, clean[1])
    assert first[37:, :2].isnan().all()  # the two query heads of the key head
    assert torch.equal(first[37:, 2:], clean[0][37:, 2:])


def test_only_the_tokens_slots_are_written(kernels: NativeKernels, dtype: torch.dtype) -> None:
    requests = make_requests(LENGTHS, dtype=dtype, int8=True)
    pool = Pool(kernels, requests)
    pool.attend(*((request, 0, context) for request, context in enumerate(CONTEXT) if context))
    before, scales = pool.cache.clone(), pool.scales.clone()
    spans: list[Span] = [(request, CONTEXT[request], length) for request, length in enumerate(LENGTHS)]
    pool.attend(*spans)
    num_vectors = sum(end - start for _, start, end in spans) * 2 * requests.num_kv_heads
    assert int((scales.isnan() & ~pool.scales.isnan()).sum()) == num_vectors
    kept = ~scales.isnan()
    assert torch.equal(pool.scales[kept], scales[kept])
    owned = {int(block) for block in pool.tables.flatten() if block}
    others = [block for block in range(len(pool.cache)) if block not in owned]
    assert torch.equal(pool.cache[others], before[others])


def test_half_the_memory() -> None:
    for head_dim in (64, 128):
        assert prod(cache_shape(9, 32, 2, head_dim, int8=True)) < 0.54 * 2 * prod(cache_shape(9, 32, 2, head_dim))


@pytest.mark.parametrize("elements", [1024, 2048 + 128])
def test_a_cache_of_another_size_is_refused(kernels: NativeKernels, elements: int) -> None:
    requests = make_requests([9], dtype=torch.float32, head_dim=16, rotary_dim=0, int8=True)
    pool = Pool(kernels, requests)
    cache = torch.zeros(*pool.cache.shape[:-1], elements, dtype=torch.int8)
    with pytest.raises(RuntimeError, match="cache does not fit 2 heads of 16"):
        kernels.attend(requests.heads[0], 2, UNCHANGED, cache, pool.step((0, 0, 9)), scale=0.1)
