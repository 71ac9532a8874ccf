"""RMSNorm (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + eps) x weight, computed in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from miniserve.layers.linear import parameter


class RMSNorm(nn.Module):
    """Normalises the last dimension. The weight is kept in fp32: it is small, and the sum is fp32 anyway."""

    def __init__(self, size: int, *, eps: float, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=torch.float32, device=device)
        self.size = size
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x: [..., size] of any float dtype -> the same shape, in `dtype`."""
        return F.rms_norm(x.float(), (self.size,), self.weight, self.eps).to(dtype)
