"""RMSNorm (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + eps) x weight, computed in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from miniserve.kernels.native import NativeKernels, Norm


class RMSNorm(nn.Module):
    """Normalises the last dimension. The weight is kept in fp32: it is small, and the sum is fp32 anyway."""

    eps: Tensor  # fp32 [1]

    def __init__(self, size: int, *, eps: float, device: torch.device) -> None:
        super().__init__()
        weight = torch.empty(size, dtype=torch.float32, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.size = size
        self.native = Norm(self.weight.data, eps)  # the same norm, as the compiled kernels take it
        self.register_buffer("eps", torch.full((1,), eps, dtype=torch.float32, device=device), persistent=False)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x: [..., size] of any float dtype -> the same shape, in `dtype`."""
        x = x.float()
        # PyTorch has no fused RMSNorm on a CPU; these five operations are two thirds of what F.rms_norm runs there.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, norm, norm, value=1 / self.size).rsqrt_()
        return torch.mul(x * scale, self.weight, out=torch.empty_like(x, dtype=dtype))

    def normalise_columns_(self, x: Tensor, first: int, kernels: NativeKernels | None) -> None:
        """Columns [first, first + size) of x [num_rows, num_columns], in place."""
        if kernels is not None:
            kernels.normalise_(x, first, self.native)
        else:
            columns = x[:, first : first + self.size]
            columns.copy_(self(columns, x.dtype))
