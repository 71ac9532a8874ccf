"""How probable tokens are: from rows of logits to `TokenLogprobs`, through one transfer to the host.

Takes the logits as the model gave them, and knows nothing of what a request changes in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor

from miniserve.kernels import sampling
from miniserve.kernels.sampling import SamplingOperators
from miniserve.outputs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobQuery:
    """Which token's logprob is asked for in which row, and how many of the most probable tokens beside it."""

    row: int
    token_id: int
    num_top: int


def pack_logprobs(
    logits: Tensor, queries: Sequence[LogprobQuery], num_top: int, operators: SamplingOperators = sampling
) -> Tensor:
    """What `unpack_logprobs` needs, small, and still on the device.

    Args:
        logits: fp32 [num_queries, vocab_size], the row of each query.
        queries: one per row of logits.
        num_top: the most that any query asks for, of these and of those that will be unpacked together with them.
        operators: the native kernels, or PyTorch's.

    Returns:
        int32 [num_queries, 2 + 2 * num_top]: the token's rank, the bits of its fp32 logprob and of the most probable
        ones', which are NaN where the row has no probabilities, then the ids of the latter.
    """
    token_ids = torch.tensor([query.token_id for query in queries], device=logits.device)
    num_top = min(num_top, logits.shape[-1])
    ranks, logprobs, top_ids = operators.token_logprobs(logits, token_ids, num_top)
    return torch.cat((ranks.unsqueeze(1), logprobs.view(torch.int32), top_ids), dim=-1)


def unpack_logprobs(packed: Tensor, queries: Sequence[LogprobQuery]) -> list[TokenLogprobs | None]:
    """The answers, one per row of what `pack_logprobs` gave; None where the row's logits are not finite."""
    num_top = packed.shape[1] // 2 - 1
    on_host = packed.cpu()
    ranks: list[int] = on_host[:, 0].tolist()
    logprobs: list[list[float]] = on_host[:, 1 : 2 + num_top].contiguous().view(torch.float32).tolist()
    top_ids: list[list[int]] = on_host[:, 2 + num_top :].tolist()
    rows = zip(queries, ranks, logprobs, top_ids, strict=True)
    return [None if isnan(values[0]) else _entry(query, rank, values, ids) for query, rank, values, ids in rows]


def _entry(query: LogprobQuery, rank: int, logprobs: Sequence[float], top_ids: Sequence[int]) -> TokenLogprobs:
    top = zip(top_ids[: query.num_top], logprobs[1 : 1 + query.num_top], strict=True)
    return TokenLogprobs(query.token_id, logprobs[0], tuple(top), rank)
