"""Where the kernels expect what: the shapes of their caches and matrices, and memory for them."""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

# What the kernels' layouts are made of: 32 by 32 elements.
CHUNK = 32
_HUGE_PAGE_BYTES = 2**21


def cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, *, int8: bool = False
) -> tuple[int, ...]:
    """The shape of a layer's KV cache; `block_size` must be a multiple of CHUNK, see `csrc/kv_cache.h`.

    A cache of int8 has an fp32 scale for each token and head, for its key and for its value, next to what it scales.
    """
    scale_bytes = CHUNK * torch.float32.itemsize if int8 else 0
    return (num_blocks, block_size // CHUNK, num_kv_heads, 2, CHUNK * round_up(head_dim) + scale_bytes)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that begin with a cache line, in huge pages where the system has them; memory is taken as it is written."""
    return huge_pages(prod(shape), dtype).view(shape)


def interleaved(rows: Tensor) -> Tensor:
    """Groups of 16 rows of the first and the second half of `rows`, in turn; padded with zeros to whole groups."""
    half = CHUNK // 2
    parts = [padded(part, round_up(len(part), half)) for part in rows.chunk(2)]
    groups = [part.view(-1, half, *part.shape[1:]) for part in parts]
    return torch.stack(groups, dim=1).flatten(0, 2)


def padded(rows: Tensor, length: int) -> Tensor:
    """`rows` with zeros behind it, up to `length`."""
    return torch.cat((rows, rows.new_zeros(length - len(rows), *rows.shape[1:])))


def round_up(size: int, multiple: int = CHUNK) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def huge_pages(num_elements: int, dtype: torch.dtype) -> Tensor:
    """[num_elements] zeros, in huge pages where the system has them: streaming is then free of TLB misses."""
    num_bytes = num_elements * dtype.itemsize
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(num_bytes // dtype.itemsize, dtype=dtype)
    length = round_up(num_bytes, _HUGE_PAGE_BYTES) + _HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[start : start + num_bytes].view(dtype)
