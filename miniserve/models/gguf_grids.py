"""Tensors that a GGUF file has as whole numbers already: the same numbers as a `Grid`, nothing rounded again.

Layouts: ggml's block_q4_0, block_q4_1, block_q8_0 and block_q4_K. The scales of the first three are fp16 in the file;
those of Q4_K are products of an fp16 and a whole number, and rounded to fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from miniserve.kernels.quantised import Grid


def has_grid(quant_type: str) -> bool:
    """Whether tensors of this type can be read as a grid."""
    return quant_type in _READERS


def read_grid(quant_type: str, blocks: Tensor) -> Grid:
    """The grid of a matrix.

    Args:
        quant_type: ggml's name of it, one that `has_grid`.
        blocks: uint8 [num_rows, num_blocks, block_bytes].
    """
    return _READERS[quant_type](blocks)


def _q4_0(blocks: Tensor) -> Grid:
    return Grid(_rows(_nibbles(blocks[..., 2:])), 4, _halves(blocks[..., :2]))


def _q4_1(blocks: Tensor) -> Grid:
    return Grid(_rows(_nibbles(blocks[..., 4:])), 4, _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _q8_0(blocks: Tensor) -> Grid:
    return Grid(_rows(blocks[..., 2:] ^ 128), 8, _halves(blocks[..., :2]))  # from signed to codes around 128


def _q4_k(blocks: Tensor) -> Grid:
    """256 elements in 8 groups, whose scales and minima are 6 bits each, packed in 12 bytes."""
    scale, minimum = _halves(blocks[..., :2]).float(), _halves(blocks[..., 2:4]).float()
    a, b, c = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((a & 63, (c & 15) | (a >> 6) << 4), dim=-1)
    minima = torch.cat((b & 63, (c >> 4) | (b >> 6) << 4), dim=-1)
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], -1, 32))  # each 32 bytes are two groups
    return Grid(
        _rows(codes),
        4,
        _rows(scale.unsqueeze(-1) * scales).half(),
        _rows(-minimum.unsqueeze(-1) * minima).half(),
    )


_READERS: Mapping[str, Callable[[Tensor], Grid]] = MappingProxyType(
    {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k}
)


def _nibbles(packed: Tensor) -> Tensor:
    """The low four bits of all bytes of the last dimension, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _halves(stored: Tensor) -> Tensor:
    """fp16 [num_rows, num_blocks] of two bytes each."""
    return stored.contiguous().view(torch.float16).squeeze(-1)


def _rows(x: Tensor) -> Tensor:
    """[num_rows, ...] as a matrix."""
    return x.flatten(1).contiguous()
