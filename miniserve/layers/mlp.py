"""SwiGLU feed-forward (Shazeer, 2020): down(silu(gate(x)) x up(x)), with gate and up in one matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from miniserve.layers.linear import Linear


class MLP(nn.Module):
    """The gated feed-forward block of a layer."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=bias, dtype=dtype, device=device)
        self.down = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        down: Tensor = self.down(F.silu(gate).mul_(up))
        return down
