"""The reference backend: attention as the formula says it, one request and one fp32 softmax at a time.

softmax(q k^T x scale + causal mask) v (Vaswani et al., 2017), with each key/value head shared by a group of query
heads (Ainslie et al., 2023), and what an `AttentionVariant` adds. Slow on purpose: the oracle that every other backend
is tested against.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miniserve.attention.base import AttentionBackend, AttentionPlan, AttentionVariant, LayerKVCache
from miniserve.attention.batch import AttnMetadata, causal_mask


@dataclass(frozen=True, slots=True)
class TorchPlan(AttentionPlan):
    """Loops over the requests of the step."""

    metadata: AttnMetadata

    def __call__(self, query: Tensor, key_value: Tensor, variant: AttentionVariant, cache: LayerKVCache) -> Tensor:
        """See `AttentionPlan`."""
        cache.write(self.metadata.slot_mapping, key_value)
        queries = query.split_with_sizes(self.metadata.query_lens_host)
        outputs = [self._attend(request, q, variant, cache) for request, q in enumerate(queries)]
        return torch.cat(outputs)

    def _attend(self, request: int, query: Tensor, variant: AttentionVariant, cache: LayerKVCache) -> Tensor:
        seq_len = self.metadata.seq_lens_host[request]
        sequence = cache.gather(self.metadata.block_tables[request])[:seq_len].float()
        keys, values = sequence.chunk(2, dim=1)  # [seq_len, num_kv_heads, head_dim]
        group_size = query.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(group_size, dim=1)  # [seq_len, num_heads, head_dim]
        values = values.repeat_interleave(group_size, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * variant.scale
        if variant.soft_cap:
            scores = variant.soft_cap * (scores / variant.soft_cap).tanh()
        visible = causal_mask(query.shape[0], seq_len, query.device, variant.window)
        probs = softmax_with_sinks(scores.masked_fill(~visible, float("-inf")), variant.sinks)
        return torch.einsum("hqk,khd->qhd", probs, values).to(query.dtype)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension of `scores` [..., num_heads, num_queries, num_keys].

    With `sinks` [num_heads], each row has one score more, whose share goes to no key.
    """
    if sinks is None:
        return scores.softmax(dim=-1)
    column = sinks[:, None, None].to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]


class TorchBackend(AttentionBackend):
    """Plain PyTorch, the oracle."""

    name = "torch"

    def plan(self, metadata: AttnMetadata) -> TorchPlan:
        """Nothing to prepare."""
        return TorchPlan(metadata)
