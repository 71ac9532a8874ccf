"""Whole requests, and a paged cache in the kernels' layout that any part of them can be computed into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import nan
from typing import Any

import torch
from torch import Tensor

from miniserve.kernels import reference
from miniserve.kernels.layout import CHUNK, cache_shape
from miniserve.kernels.native import HeadTransform, NativeKernels, Norm, PagedStep

LENGTHS = (1, 5, 32, 33, 70, 300)  # a block more or less, and more than the 256 keys of a softmax span
# A prompt, one decode, a chunk, a long one's decode and a chunk across the span, in one step.
CONTEXT = (0, 4, 0, 20, 69, 250)
GARBAGE = 1e4  # what slots hold that belong to nobody: far beyond any real key, so that a wrong look shows
UNCHANGED = HeadTransform(rope=None)
Span = tuple[int, int, int]  # tokens start to end of a request


@dataclass(frozen=True)
class Requests:
    """The projected heads of whole requests, as a layer would compute them, and how attention treats them."""

    heads: tuple[Tensor, ...]  # one a request, [seq_len, q | k | v heads, head_dim]
    num_kv_heads: int
    block_size: int
    transform: HeadTransform = UNCHANGED
    soft_cap: float = 0.0
    window: int = 0
    sinks: Tensor | None = None
    int8: bool = False  # the cache

    @property
    def head_dim(self) -> int:
        return self.heads[0].shape[2]

    @property
    def options(self) -> dict[str, Any]:
        return {
            "scale": self.head_dim**-0.5,
            "soft_cap": self.soft_cap,
            "window": self.window,
            "sinks": self.sinks,
        }

    def expected(self, request: int) -> Tensor:
        """What the twin says, fp32 [seq_len, num_heads, head_dim]."""
        heads, transform = self.heads[request], self.transform
        num_heads = heads.shape[1] - 2 * self.num_kv_heads
        query, key, value = heads.split_with_sizes((num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        positions = torch.arange(len(heads))
        q_norm, k_norm = (
            None if weight is None else Norm(weight, transform.eps) for weight in (transform.q_norm, transform.k_norm)
        )
        query = reference.transform_heads(query, q_norm, transform.rope, positions)
        key = reference.transform_heads(key, k_norm, transform.rope, positions)
        if self.int8:
            key, value = reference.as_int8(key), reference.as_int8(value)
        return reference.attend(query, key, value, **self.options)


class Pool:
    """Shuffled blocks full of garbage, some of which belong to the requests."""

    def __init__(self, kernels: NativeKernels, requests: Requests, *, seed: int = 0) -> None:
        self.kernels = kernels
        self.requests = requests
        counts = [-(-len(heads) // requests.block_size) for heads in requests.heads]
        num_blocks = 1 + sum(counts) + 2  # block 0, and two that nobody holds
        layout = (num_blocks, requests.block_size, requests.num_kv_heads, requests.head_dim)
        shape = cache_shape(*layout, int8=requests.int8)
        if requests.int8:  # what is finite has scales that are not
            self.cache = torch.full(shape, 127, dtype=torch.int8)
            self.scales.fill_(nan)
        else:
            self.cache = torch.full(shape, GARBAGE).to(requests.heads[0].dtype)
        shuffled = 1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed))
        self.tables = torch.zeros(len(counts), max(counts), dtype=torch.int64)
        for request, ids in enumerate(torch.split(shuffled[: sum(counts)], counts)):
            self.tables[request, : len(ids)] = ids

    @property
    def scales(self) -> Tensor:
        """Of an int8 cache, fp32 [num_blocks, chunks, num_kv_heads, 2, 32]: a view."""
        return self.cache[..., -4 * CHUNK :].view(torch.float32)

    def break_before(self, request: int, key: int) -> None:
        """Make what is not a number of the chunks of a request's cache that lie wholly before `key`."""
        for chunk in range(key // CHUNK):
            block, part = divmod(chunk, self.requests.block_size // CHUNK)
            values = self.scales if self.requests.int8 else self.cache
            values[self.tables[request, block], part] = nan

    def attend(self, *spans: Span) -> list[Tensor]:
        """One step that computes `spans`; for each, [end - start, num_heads, head_dim]."""
        step = self.step(*spans)
        heads = torch.cat([self.requests.heads[request][start:end] for request, start, end in spans])
        transform = self.requests.transform
        out = self.kernels.attend(
            heads,
            self.requests.num_kv_heads,
            transform,
            self.cache,
            step,
            **self.requests.options,
        )
        return list(out.split_with_sizes([end - start for _, start, end in spans]))

    def step(self, *spans: Span) -> PagedStep:
        return PagedStep(
            torch.tensor([0, *accumulate(end - start for _, start, end in spans)], dtype=torch.int32),
            torch.tensor([end for *_, end in spans], dtype=torch.int32),
            self.tables[[request for request, *_ in spans]],
        )


def make_requests(
    lengths: Sequence[int],
    *,
    dtype: torch.dtype,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 32,
    rotary_dim: int | None = None,
    qk_norm: bool = False,
    soft_cap: float = 0.0,
    window: int = 0,
    sinks: bool = False,
    int8: bool = False,
) -> Requests:
    """Random requests; `rotary_dim` None turns the whole head, 0 nothing."""
    generator = torch.Generator().manual_seed(head_dim)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    transform = HeadTransform(None if rotary_dim == 0 else rope_table(rotary_dim or head_dim, max(lengths)))
    if qk_norm:
        transform = replace(transform, q_norm=1 + 0.3 * randn(head_dim), k_norm=1 + 0.3 * randn(head_dim), eps=1e-5)
    return Requests(
        heads=tuple(randn(length, num_heads + 2 * num_kv_heads, head_dim).to(dtype) for length in lengths),
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        transform=transform,
        soft_cap=soft_cap,
        window=window,
        sinks=2.0 * randn(num_heads) if sinks else None,
        int8=int8,
    )


def rope_table(rotary_dim: int, num_positions: int) -> Tensor:
    """fp32 [num_positions, 2, rotary_dim], cos and signed sin."""
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies)
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), dim=-1)
    return torch.stack((cos, sin), dim=1).contiguous()


def check(kernels: NativeKernels, requests: Requests, *, fp32_tolerance: float = 2e-5) -> None:
    """All contexts in one step, then the rest in one that mixes prompts, chunks and decodes."""
    pool = Pool(kernels, requests)
    lengths = [len(heads) for heads in requests.heads]
    contexts = [(request, 0, context) for request, context in enumerate(CONTEXT[: len(lengths)]) if context]
    rest = [(request, context, length) for request, (context, length) in enumerate(zip(CONTEXT, lengths, strict=False))]
    for spans in (contexts, rest):
        for (request, start, end), output in zip(spans, pool.attend(*spans), strict=True):
            assert_close(output, requests.expected(request)[start:end], fp32_tolerance=fp32_tolerance)


def assert_close(actual: Tensor, expected: Tensor, *, fp32_tolerance: float = 2e-5) -> None:
    """In bf16, probabilities and results are rounded."""
    tolerance = 2e-2 if actual.dtype == torch.bfloat16 else fp32_tolerance
    torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=tolerance)


def whole(kernels: NativeKernels, requests: Requests) -> list[Tensor]:
    """Each request alone, in one step."""
    return [Pool(kernels, requests).attend((r, 0, len(heads)))[0] for r, heads in enumerate(requests.heads)]


def in_chunks(kernels: NativeKernels, requests: Requests, size: int) -> list[Tensor]:
    """All requests together, up to `size` tokens of each a step."""
    pool = Pool(kernels, requests, seed=size)
    lengths = [len(heads) for heads in requests.heads]
    outputs: list[list[Tensor]] = [[] for _ in lengths]
    for start in range(0, max(lengths), size):
        spans = [(r, start, min(start + size, length)) for r, length in enumerate(lengths) if start < length]
        for (request, *_), output in zip(spans, pool.attend(*spans), strict=True):
            outputs[request].append(output)
    return [torch.cat(parts) for parts in outputs]
