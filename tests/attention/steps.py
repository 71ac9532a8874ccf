"""Steps of attention to compare backends on: requests with lengths, scattered over a pool that is full of garbage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from miniserve.attention.base import LayerKVCache
from miniserve.attention.batch import AttnMetadata

GARBAGE = 1e4  # what slots hold that belong to nobody: far beyond any real key, so that a wrong look shows


@dataclass(frozen=True)
class Step:
    """One step, its inputs, and the truth: the whole keys and values of each request, without any paging."""

    metadata: AttnMetadata
    query: Tensor  # [num_tokens, num_heads, head_dim]
    key: Tensor  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor
    cache: LayerKVCache
    keys: tuple[Tensor, ...]  # one a request, [seq_len, num_kv_heads, head_dim]
    values: tuple[Tensor, ...]

    @property
    def key_value(self) -> Tensor:
        """What a layer hands over: [num_tokens, 2 x num_kv_heads, head_dim]."""
        return torch.cat((self.key, self.value), dim=1)

    def fresh_cache(self) -> LayerKVCache:
        """A copy of the cache as it is before the step."""
        return LayerKVCache(self.cache.key_values.clone())


def make_step(
    lengths: Sequence[tuple[int, int]],  # (new tokens, whole length) of each request
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Step:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    counts = [-(-seq_len // block_size) for _, seq_len in lengths]
    num_blocks = 1 + sum(counts) + 3  # block 0, and three that nobody holds
    free = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    cache = LayerKVCache(torch.cat((torch.full(shape, GARBAGE), torch.full(shape, -GARBAGE)), dim=2).to(dtype))
    cached_keys, cached_values = cache.key_values.flatten(0, 1).chunk(2, dim=1)
    # As a layer hands them over: parts of one projection, not contiguous.
    num_tokens = sum(query_len for query_len, _ in lengths)
    heads = randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
    slot_mapping, keys, values = [], [], []
    start = 0
    for request, ((query_len, seq_len), count) in enumerate(zip(lengths, counts, strict=True)):
        blocks, free = free[:count], free[count:]
        tables[request, :count] = torch.tensor(blocks)
        slots = [blocks[position // block_size] * block_size + position % block_size for position in range(seq_len)]
        context = seq_len - query_len
        context_keys, context_values = randn(2, context, num_kv_heads, head_dim).unbind(0)
        cached_keys[slots[:context]] = context_keys
        cached_values[slots[:context]] = context_values
        keys.append(torch.cat((context_keys, key[start : start + query_len])))
        values.append(torch.cat((context_values, value[start : start + query_len])))
        slot_mapping += slots[context:]
        start += query_len
    query_lens = tuple(query_len for query_len, _ in lengths)
    seq_lens = tuple(seq_len for _, seq_len in lengths)
    metadata = AttnMetadata(
        slot_mapping=torch.tensor(slot_mapping),
        query_start_loc=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=tables,
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
        block_size=block_size,
    )
    return Step(metadata, query, key, value, cache, tuple(keys), tuple(values))


MIXED = ((1, 9), (6, 6), (1, 30), (4, 20), (6, 6), (1, 1), (4, 20))
STEPS: dict[str, tuple[tuple[int, int], ...]] = {
    "first-token": ((1, 1),),
    "one-decode": ((1, 19),),
    "decode-equal": ((1, 7), (1, 7), (1, 7)),
    "decode-unequal": ((1, 1), (1, 33), (1, 9), (1, 16)),
    "decode-longest-first": ((1, 33), (1, 16), (1, 9), (1, 1)),
    "one-prompt": ((21, 21),),
    "prompts": ((5, 5), (17, 17)),
    "one-prompt-with-context": ((5, 21),),
    "prompts-with-context": ((5, 21), (3, 4)),
    "equal-prompts-in-a-row": ((6, 6), (6, 6), (6, 6), (1, 3)),
    "equal-prompts-apart": ((6, 6), (1, 5), (6, 6), (3, 9), (6, 6)),
    "equal-chunks-in-a-row": ((4, 12), (4, 12)),
    "equal-chunks-apart": ((4, 12), (1, 3), (4, 12)),
    "mixed": MIXED,
}
