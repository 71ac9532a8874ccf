"""y = x W^T + b, with the weight in the layout that the device multiplies fastest.

On a CPU in bf16, PyTorch's linear re-lays the weight out at every call. `pack` does it once, with the oneDNN
operators that PyTorch's own compiler uses for frozen weights, and drops the plain weight: one copy in memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The row count oneDNN is told to expect when it picks a layout; any other count runs on the same layout.
_EXPECTED_ROWS = 16


class Linear(nn.Module):
    """A linear layer without training. `weight` [out_features, in_features] until `pack` replaces it."""

    weight: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = parameter(out_features, dtype=dtype, device=device) if bias else None
        self._packed: Tensor | None = None  # oneDNN's opaque layout

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features]."""
        if self._packed is not None:
            return packed_linear(x, self._packed, self.bias)
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Swap the loaded weight for its packed form, where `can_pack` says so."""
        if self.weight is not None and can_pack(self.weight):
            self._packed = pack_weight(self.weight.data)
            self.weight = None


def can_pack(weight: Tensor) -> bool:
    """Whether packing exists and pays: bf16 on a CPU, in a PyTorch built with oneDNN that has these operators."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return all(hasattr(torch.ops.mkldnn, name) for name in names) and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_weight(weight: Tensor) -> Tensor:
    """`weight` [out_features, in_features] in oneDNN's opaque layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _EXPECTED_ROWS)
    return packed


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str = "none") -> Tensor:
    """activation(x W^T + bias) for a packed `weight`; `activation` in oneDNN's names: none, swish (which is silu)."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")
    return result


def packed_linear_times(x: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor) -> Tensor:
    """(x W^T + bias) x factor, element by element, for a packed `weight`."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, factor, weight, bias, "mul")
    return result


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An unfilled parameter that never asks for a gradient; the loader fills it."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
