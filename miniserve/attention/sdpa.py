"""The portable fast backend: PyTorch's fused `scaled_dot_product_attention` over KV gathered from the blocks.

Requests are put into groups that one call can serve. Those that decode (one new token each) share a call whatever
their lengths, padded to the longest and masked; prompts share one when both their new tokens and their lengths are
equal. Masks and gather indices are made once a step, in `plan`. Grouped-query attention: in a decode step the query
heads that share a KV head take the place of query positions, so no key is repeated.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from miniserve.attention.base import AttentionBackend, AttentionPlan, LayerKVCache
from miniserve.attention.batch import AttnMetadata, causal_mask

# A further decode group costs as much, per layer, as reading about this many padded tokens (measured on a CPU).
_GROUP_COST = 512


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that one SDPA call serves.

    Attributes:
        rows: the group's new tokens on the packed axis: a slice, or int64 [batch x query_len].
        block_ids: int64 [batch x num_blocks], the blocks to gather; None when all keys are in this step's input.
        mask: 0 or -inf in the dtype of the queries, broadcast to [batch, heads, queries, seq_len]; None where every
            key is visible, or `is_causal` says which.
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

    def __call__(self, query: Tensor, key_value: Tensor, cache: LayerKVCache) -> Tensor:
        """See `AttentionPlan`."""
        cache.write(self.slot_mapping, key_value)
        if len(self.groups) == 1 and isinstance(self.groups[0].rows, slice):
            return self._attend(self.groups[0], query, key_value, cache)  # all rows, in their order
        output = torch.empty_like(query)
        for group in self.groups:
            output[group.rows] = self._attend(group, query[group.rows], key_value, cache)
        return output

    def _attend(self, group: Group, query: Tensor, key_value: Tensor, cache: LayerKVCache) -> Tensor:
        """[batch x query_len, num_heads, head_dim] for the group's queries; `key_value` is the whole step's."""
        tokens = key_value[group.rows] if group.block_ids is None else cache.gather(group.block_ids)
        by_request = tokens.view(group.batch, -1, *tokens.shape[1:])[:, : group.seq_len].transpose(1, 2)
        key, value = by_request.chunk(2, dim=1)  # [batch, num_kv_heads, seq_len, head_dim]
        num_kv_heads, head_dim = key.shape[1], key.shape[3]
        if group.query_len == 1:
            heads = query.view(group.batch, num_kv_heads, -1, head_dim)  # query heads of a KV head as positions
            output = F.scaled_dot_product_attention(heads, key, value, attn_mask=group.mask, scale=self.scale)
            return output.reshape(query.shape)
        heads = query.view(group.batch, group.query_len, -1, head_dim).transpose(1, 2)
        output = F.scaled_dot_product_attention(
            heads,
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
        """Group the requests, and make the gather indices and masks of each group."""
        decodes: list[int] = []
        prompts: dict[tuple[int, int], list[int]] = defaultdict(list)
        lens = zip(metadata.query_lens_host, metadata.seq_lens_host, strict=True)
        for request, (query_len, seq_len) in enumerate(lens):
            if query_len == 1:
                decodes.append(request)
            else:
                prompts[query_len, seq_len].append(request)
        decodes.sort(key=lambda request: -metadata.seq_lens_host[request])  # stable: sorted input stays in place
        members = [*_split_by_length(decodes, metadata.seq_lens_host), *prompts.values()]
        groups = tuple(_make_group(metadata, requests, self.dtype) for requests in members)
        return SdpaPlan(metadata.slot_mapping, groups, self.scale)


def _split_by_length(requests: list[int], seq_lens: tuple[int, ...]) -> list[list[int]]:
    """Decoding requests, longest first, in groups of similar length: where that saves more padding than it costs."""
    if not requests:
        return []
    longest = seq_lens[requests[0]]
    saved, split = max(((longest - seq_lens[r]) * (len(requests) - i), i) for i, r in enumerate(requests))
    if saved < _GROUP_COST:
        return [requests]
    head, tail = requests[:split], requests[split:]
    return [*_split_by_length(head, seq_lens), *_split_by_length(tail, seq_lens)]


def _make_group(metadata: AttnMetadata, requests: list[int], dtype: torch.dtype) -> Group:
    device = metadata.slot_mapping.device
    lens = [metadata.seq_lens_host[request] for request in requests]
    query_len, seq_len = metadata.query_lens_host[requests[0]], max(lens)
    whole_prompt = query_len == seq_len
    visible = None
    if query_len == 1 and min(lens) < seq_len:
        visible = torch.arange(seq_len)[None, None, None, :] < torch.tensor(lens)[:, None, None, None]
    elif query_len > 1 and not whole_prompt:
        visible = causal_mask(query_len, seq_len, device)
    return Group(
        batch=len(requests),
        query_len=query_len,
        seq_len=seq_len,
        rows=_rows(metadata, requests, query_len),
        block_ids=None if whole_prompt else _block_ids(metadata, requests, seq_len),
        mask=None if visible is None else _additive(visible, dtype).to(device),
        is_causal=whole_prompt and query_len > 1,
    )


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """SDPA turns a bool mask into this form in every layer; here it is done once."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def _block_ids(metadata: AttnMetadata, requests: list[int], seq_len: int) -> Tensor:
    num_blocks = -(-seq_len // metadata.block_size)
    tables = metadata.block_tables[:, :num_blocks]
    if requests != list(range(metadata.num_reqs)):
        tables = tables[torch.tensor(requests, device=tables.device)]
    return tables.reshape(-1)


def _rows(metadata: AttnMetadata, requests: list[int], query_len: int) -> slice | Tensor:
    """The group's tokens on the packed axis; a slice where they lie together, which copies nothing."""
    starts = [0, *accumulate(metadata.query_lens_host)]
    first = starts[requests[0]]
    if requests == list(range(requests[0], requests[0] + len(requests))):
        return slice(first, first + len(requests) * query_len)
    offsets = torch.tensor([starts[request] for request in requests])[:, None] + torch.arange(query_len)
    return offsets.reshape(-1).to(metadata.slot_mapping.device)
