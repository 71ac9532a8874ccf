"""Both ends of the transformer: token ids to vectors, and vectors to logits. Often one matrix serves as both.

The matrix keeps its plain layout, because single rows of it are read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from miniserve.layers.linear import parameter

# How many of the largest logits are computed again in fp32.
_NUM_EXACT = 64


class Embedding(nn.Module):
    """One vector per token id."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids: int64 [num_tokens] -> [num_tokens, hidden_size]."""
        return F.embedding(token_ids, self.weight)


class Head(nn.Module):
    """The output matrix of a model whose embedding does not serve as one. `weight` [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size, dtype=dtype, device=device)


def output_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [num_rows, hidden_size] times weight [vocab_size, hidden_size] -> fp32 [num_rows, vocab_size].

    A product of bf16 matrices is rounded to bf16: at 25, a usual logit, in steps of 0.125, so that the best tokens
    are often equal and the choice between them is an accident. The largest logits of a row are therefore computed
    again, in fp32 from the same numbers.
    """
    if hidden.dtype == torch.float32:
        return F.linear(hidden, weight)
    logits = _product(hidden, weight).float()
    largest = logits.topk(min(_NUM_EXACT, logits.shape[-1]), dim=-1).indices  # [num_rows, _NUM_EXACT]
    exact = torch.bmm(weight[largest].float(), hidden.float().unsqueeze(-1)).squeeze(-1)
    return logits.scatter_(-1, largest, exact)


def _product(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden weight^T, in their dtype. On a CPU, oneDNN re-lays out the right operand: the large one goes left."""
    if hidden.device.type == "cpu" and hidden.dtype == torch.bfloat16 and hidden.shape[0] > 1:
        return torch.mm(weight, hidden.T).T.contiguous()
    return F.linear(hidden, weight)
