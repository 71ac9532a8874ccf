"""The portable fast backend: PyTorch's fused `scaled_dot_product_attention` over KV gathered from the blocks.

Requests are put into groups that one call can serve. Those that decode (one new token each) share a call whatever
their lengths, padded to the longest and masked; prompts share one when both their new tokens and their lengths are
equal. Gather indices are made once a step, in `plan`; masks once a step for each window that a layer has. Grouped-query
attention: in a decode step the query heads that share a KV head take the place of query positions, so no key is
repeated. What the fused operator does not know, soft caps and sinks, is computed by the formula.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from miniserve.attention.base import AttentionBackend, AttentionPlan, AttentionVariant, LayerKVCache
from miniserve.attention.batch import AttnMetadata
from miniserve.attention.torch_ref import softmax_with_sinks

# A further decode group costs as much, per layer, as reading about this many padded tokens (measured on a CPU).
_GROUP_COST = 512


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that one SDPA call serves.

    Attributes:
        query_len: new tokens of each of them.
        seq_lens: their lengths, which differ only where `query_len` is 1.
        rows: the group's new tokens on the packed axis: a slice, or int64 [batch x query_len].
        block_ids: int64 [batch x num_blocks], the blocks to gather; None when all keys are in this step's input.
        masks: by window, what `mask` has given already.
    """

    query_len: int
    seq_lens: tuple[int, ...]
    rows: slice | Tensor
    block_ids: Tensor | None
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """How many requests."""
        return len(self.seq_lens)

    @property
    def seq_len(self) -> int:
        """The longest of them."""
        return max(self.seq_lens)

    def is_causal(self, window: int | None) -> bool:
        """Whether each query sees exactly what is before it, from the beginning of the sequence on."""
        return self.block_ids is None and not self._limits(window)

    def mask(self, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """0 or -inf [1 or batch, 1, query_len, seq_len]; None where each query sees every key."""
        if window not in self.masks:
            self.masks[window] = self._make_mask(window, dtype, device)
        return self.masks[window]

    def _make_mask(self, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        all_equal = min(self.seq_lens) == self.seq_len
        if self.query_len == 1 and all_equal and not self._limits(window):
            return None
        keys = torch.arange(self.seq_len)
        lens = torch.tensor(self.seq_lens[:1] if all_equal else self.seq_lens)[:, None, None]
        queries = lens - self.query_len + torch.arange(self.query_len)[:, None]  # [1 or batch, query_len, 1]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        # SDPA turns a bool mask into this form in every layer; here it is done once.
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        return mask.unsqueeze(1).to(device)

    def _limits(self, window: int | None) -> bool:
        return window is not None and window < self.seq_len


@dataclass(frozen=True, slots=True)
class SdpaPlan(AttentionPlan):
    """The groups of one step."""

    slot_mapping: Tensor
    groups: tuple[Group, ...]

    def __call__(self, query: Tensor, key_value: Tensor, variant: AttentionVariant, cache: LayerKVCache) -> Tensor:
        """See `AttentionPlan`."""
        cache.write(self.slot_mapping, key_value)
        if len(self.groups) == 1 and isinstance(self.groups[0].rows, slice):
            return _attend(self.groups[0], query, key_value, variant, cache)  # all rows, in their order
        output = torch.empty_like(query)
        for group in self.groups:
            output[group.rows] = _attend(group, query[group.rows], key_value, variant, cache)
        return output


def _attend(group: Group, query: Tensor, key_value: Tensor, variant: AttentionVariant, cache: LayerKVCache) -> Tensor:
    """[batch x query_len, num_heads, head_dim] for the group's queries; `key_value` is the whole step's."""
    tokens = key_value[group.rows] if group.block_ids is None else cache.gather(group.block_ids)
    by_request = tokens.view(group.batch, -1, *tokens.shape[1:])[:, : group.seq_len].transpose(1, 2)
    key, value = by_request.chunk(2, dim=1)  # [batch, num_kv_heads, seq_len, head_dim]
    if variant.soft_cap or variant.sinks is not None:
        return _attend_by_formula(group, query, key, value, variant)
    if group.query_len == 1:
        heads = query.view(group.batch, key.shape[1], -1, key.shape[3])  # query heads of a KV head as positions
        mask = group.mask(variant.window, query.dtype, query.device)
        return F.scaled_dot_product_attention(heads, key, value, attn_mask=mask, scale=variant.scale).reshape(
            query.shape
        )
    is_causal = group.is_causal(variant.window)
    output = F.scaled_dot_product_attention(
        query.view(group.batch, group.query_len, -1, key.shape[3]).transpose(1, 2),
        key,
        value,
        attn_mask=None if is_causal else group.mask(variant.window, query.dtype, query.device),
        is_causal=is_causal,
        scale=variant.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).reshape(query.shape)


def _attend_by_formula(group: Group, query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant) -> Tensor:
    """The same with soft cap and sinks: scores and softmax in fp32, for all queries at once."""
    group_size = query.shape[1] // key.shape[1]
    heads = query.view(group.batch, group.query_len, -1, key.shape[3]).transpose(1, 2)
    keys, values = (tokens.repeat_interleave(group_size, dim=1) for tokens in (key, value))
    scores = (heads @ keys.transpose(2, 3)).float() * variant.scale  # [batch, num_heads, query_len, seq_len]
    if variant.soft_cap:
        scores = (scores / variant.soft_cap).tanh_() * variant.soft_cap
    mask = group.mask(variant.window, query.dtype, query.device)
    if mask is not None:
        scores += mask
    probs = softmax_with_sinks(scores, variant.sinks).to(query.dtype)
    return (probs @ values).transpose(1, 2).reshape(query.shape)


class SdpaBackend(AttentionBackend):
    """`scaled_dot_product_attention` on every device."""

    name = "sdpa"

    def plan(self, metadata: AttnMetadata) -> SdpaPlan:
        """Group the requests, and make the gather indices of each group."""
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
        return SdpaPlan(metadata.slot_mapping, tuple(_make_group(metadata, requests) for requests in members))


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


def _make_group(metadata: AttnMetadata, requests: list[int]) -> Group:
    seq_lens = tuple(metadata.seq_lens_host[request] for request in requests)
    query_len = metadata.query_lens_host[requests[0]]
    return Group(
        query_len=query_len,
        seq_lens=seq_lens,
        rows=_rows(metadata, requests, query_len),
        block_ids=None if query_len == max(seq_lens) else _block_ids(metadata, requests, max(seq_lens)),
    )


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
