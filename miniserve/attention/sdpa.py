"""The portable fast backend: PyTorch's fused `scaled_dot_product_attention` over KV gathered from the blocks.

Requests are put into groups that one call can serve: all that decode (one new token each) form one group, whatever
their lengths; prompts share a call when both their new tokens and their lengths are equal. Masks and gather indices
are made once a step, in `plan`. Grouped-query attention: the query heads that share a KV head take the place of
query positions, so a decode step needs no repeated keys.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from miniserve.attention.base import AttentionBackend, AttentionPlan, LayerKVCache
from miniserve.attention.batch import AttnMetadata, causal_mask


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that one SDPA call serves.

    Attributes:
        rows: the group's new tokens on the packed axis: a slice, or int64 [batch x query_len].
        block_ids: int64 [batch x num_blocks], the blocks to gather; None when all keys are in this step's input.
        mask: bool, broadcast to [batch, heads, queries, seq_len]; None where every key is visible, or `is_causal` says it.
    """

    batch: int
    query_len: int
    seq_len: int
    rows: slice | Tensor
    block_ids: Tensor | None
    mask: Tensor | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class SdpaPlan(AttentionPlan):
    """The groups of one step."""

    slot_mapping: Tensor
    groups: tuple[Group, ...]
    scale: float

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerKVCache) -> Tensor:
        cache.write(self.slot_mapping, key, value)
        if len(self.groups) == 1:
            return self._attend(self.groups[0], query, key, value, cache)
        output = torch.empty_like(query)
        for group in self.groups:
            output[group.rows] = self._attend(
                group, query[group.rows], key[group.rows], value[group.rows], cache
            )
        return output

    def _attend(self, group: Group, query: Tensor, key: Tensor, value: Tensor, cache: LayerKVCache) -> Tensor:
        """[batch x query_len, num_heads, head_dim] of one group's rows."""
        if group.block_ids is not None:
            key = cache.keys.index_select(0, group.block_ids)
            value = cache.values.index_select(0, group.block_ids)
        num_kv_heads, head_dim = key.shape[-2:]
        key = key.reshape(group.batch, -1, num_kv_heads, head_dim)[:, : group.seq_len].transpose(1, 2)
        value = value.reshape(group.batch, -1, num_kv_heads, head_dim)[:, : group.seq_len].transpose(1, 2)
        if group.query_len == 1:
            grouped = query.view(group.batch, num_kv_heads, -1, head_dim)  # query heads of a KV head as positions
            output = F.scaled_dot_product_attention(
                grouped, key, value, attn_mask=group.mask, scale=self.scale
            )
            return output.reshape(query.shape)
        batched = query.view(group.batch, group.query_len, -1, head_dim).transpose(1, 2)
        output = F.scaled_dot_product_attention(
            batched,
            key,
            value,
            attn_mask=group.mask,
            is_causal=group.is_causal,
            scale=self.scale,
            enable_gqa=query.shape[1] != num_kv_heads,
        )
        return output.transpose(1, 2).reshape(query.shape)


class SdpaBackend(AttentionBackend):
    """`scaled_dot_product_attention` on every device."""

    name = "sdpa"

    def plan(self, metadata: AttnMetadata) -> SdpaPlan:
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for request in range(metadata.num_reqs):
            query_len = metadata.query_lens_host[request]
            seq_len = metadata.seq_lens_host[request]
            members[query_len, 0 if query_len == 1 else seq_len].append(request)
        groups = tuple(_make_group(metadata, requests) for requests in members.values())
        return SdpaPlan(metadata.slot_mapping, groups, self.scale)


def _make_group(metadata: AttnMetadata, requests: list[int]) -> Group:
    device = metadata.slot_mapping.device
    lens = [metadata.seq_lens_host[request] for request in requests]
    query_len, seq_len = metadata.query_lens_host[requests[0]], max(lens)
    whole_prompt = query_len == seq_len
    mask = None
    if query_len == 1 and min(lens) < seq_len:
        visible = torch.arange(seq_len)[None, :] < torch.tensor(lens)[:, None]
        mask = visible[:, None, None, :].to(device)  # [batch, 1, 1, seq_len]
    elif query_len > 1 and not whole_prompt:
        mask = causal_mask(query_len, seq_len, device)
    return Group(
        batch=len(requests),
        query_len=query_len,
        seq_len=seq_len,
        rows=_rows(metadata, requests, query_len),
        block_ids=None if whole_prompt else _block_ids(metadata, requests, seq_len),
        mask=mask,
        is_causal=whole_prompt and query_len > 1,
    )


def _block_ids(metadata: AttnMetadata, requests: list[int], seq_len: int) -> Tensor:
    num_blocks = -(-seq_len // metadata.block_size)
    tables = metadata.block_tables[:, :num_blocks]
    if len(requests) < metadata.num_reqs:
        tables = tables[torch.tensor(requests, device=tables.device)]
    return tables.reshape(-1)


def _rows(metadata: AttnMetadata, requests: list[int], query_len: int) -> slice | Tensor:
    """The group's tokens on the packed axis; a slice where they lie together, which copies nothing."""
    starts = _starts(metadata.query_lens_host)
    first = starts[requests[0]]
    if requests[-1] - requests[0] == len(requests) - 1:
        return slice(first, first + len(requests) * query_len)
    offsets = torch.tensor([starts[request] for request in requests])[:, None] + torch.arange(query_len)
    return offsets.reshape(-1).to(metadata.slot_mapping.device)


def _starts(query_lens: tuple[int, ...]) -> list[int]:
    starts, total = [], 0
    for query_len in query_lens:
        starts.append(total)
        total += query_len
    return starts
