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
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return packed
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Swap the loaded weight for its packed form, where `can_pack` says so."""
        if self.weight is not None and can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, _EXPECTED_ROWS)
            self.weight = None


def can_pack(weight: Tensor) -> bool:
    """Whether packing exists and pays: bf16 on a CPU, in a PyTorch built with oneDNN that has these operators."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    has_ops = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )
    return has_ops and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An unfilled parameter that never asks for a gradient; the loader fills it."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
