"""`AttnMetadata`: where the tokens of one step live in the paged KV cache. Built once a step by the input builder.

It travels as an argument; backends derive what else they need from it in `AttentionBackend.plan`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttnMetadata:
    """One step's requests, packed one after the other along the token axis.

    Attributes:
        slot_mapping: int64 [num_tokens]; the slot (block id x block size + offset) of each new token's KV.
        query_start_loc: int32 [num_reqs + 1]; request i owns the new tokens [i] to [i + 1].
        seq_lens: int32 [num_reqs]; cached and new tokens of each request.
        block_tables: int64 [num_reqs, max_blocks]; block ids in token order, padded with block 0.
        query_lens_host, seq_lens_host: the same lengths on the host, so that no backend has to wait for the device.
        block_size: tokens per KV block.
    """

    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    query_lens_host: tuple[int, ...]
    seq_lens_host: tuple[int, ...]
    block_size: int

    @property
    def num_reqs(self) -> int:
        """Requests in the step."""
        return len(self.seq_lens_host)

    @property
    def max_query_len(self) -> int:
        """Most new tokens of any request."""
        return max(self.query_lens_host)

    @property
    def max_seq_len(self) -> int:
        """Longest sequence of any request, new tokens included."""
        return max(self.seq_lens_host)


def causal_mask(query_len: int, seq_len: int, device: torch.device, window: int | None = None) -> Tensor:
    """Bool [query_len, seq_len], True where a query may look: at itself and what is before it, within the window."""
    keys = torch.arange(seq_len, device=device)
    queries = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]  # the last is the sequence's last
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)
