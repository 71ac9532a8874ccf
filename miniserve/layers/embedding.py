"""Both ends of the transformer: token ids to vectors, and vectors to logits. Often one matrix serves as both.

Without kernels the matrix keeps its plain layout, because single rows of it are read; with them, rows are read out of
the packed one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from miniserve.kernels.native import Matrix, NativeKernels, PackedMatrix
from miniserve.kernels.quantised import Grid, QuantisedMatrix, Scheme
from miniserve.layers.linear import parameter
from miniserve.layers.norm import RMSNorm

# How many of the largest logits are computed again in fp32.
_NUM_EXACT = 64


class TokenMatrix(nn.Module):
    """A matrix with one row per token id: an embedding, an output head, or both. `weight` [vocab_size, hidden_size]."""

    weight: nn.Parameter | None

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype = dtype
        self._num_plain_bytes = vocab_size * hidden_size * dtype.itemsize
        self.weight = parameter(vocab_size, hidden_size, dtype=dtype, device=device)
        self._native: Matrix | None = None

    def embed(self, token_ids: Tensor, scale: float) -> Tensor:
        """token_ids: int64 [num_tokens] -> fp32 [num_tokens, hidden_size], a row for each, times `scale`."""
        if self._native is not None:
            return self._native.rows(token_ids, scale)
        assert self.weight is not None
        return F.embedding(token_ids, self.weight).float().mul_(scale)

    def logits(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """hidden: fp32 [num_rows, hidden_size] -> fp32 [num_rows, vocab_size], its normalised self times each row."""
        if self._native is not None:
            return self._native.logits(hidden, norm.native)
        assert self.weight is not None
        return output_logits(norm(hidden, self.dtype), self.weight)

    @property
    def num_bytes(self) -> int:
        """Memory of the matrix, in whatever layout it is."""
        return self._num_plain_bytes if self._native is None else self._native.num_bytes

    def pack(self, kernels: NativeKernels | None, scheme: Scheme | None = None, grid: Grid | None = None) -> None:
        """Swap the loaded matrix for the kernels' layout, as `Linear.pack` does; without kernels it stays plain."""
        if kernels is None or self.weight is None:
            return
        if scheme is None:
            self._native = PackedMatrix(kernels, self.weight.data)
        else:
            grid = scheme.head_grid(self.weight.data) if grid is None else grid
            self._native = QuantisedMatrix(kernels, grid, dtype=self.dtype, num_digits=scheme.num_digits)
        self.weight = None


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
