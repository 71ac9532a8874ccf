"""SwiGLU feed-forward (Shazeer, 2020): down(silu(gate(x)) x up(x)), with gate and up in one matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from miniserve.layers.linear import Linear, can_pack, pack_weight, packed_linear, packed_linear_times


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
        self.gate_up = GateUp(hidden_size, intermediate_size, bias=bias, dtype=dtype, device=device)
        self.down = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        down: Tensor = self.down(self.gate_up(x))
        return down


class GateUp(Linear):
    """silu(gate(x)) x up(x): [num_tokens, in_features] -> [num_tokens, out_features], one weight of gate | up rows."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(in_features, 2 * out_features, bias=bias, dtype=dtype, device=device)
        self._packed_halves: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features]."""
        if self._packed_halves is None:
            gate, up = super().forward(x).chunk(2, dim=-1)
            return F.silu(gate, inplace=True) * up
        gate_weight, up_weight = self._packed_halves
        gate_bias, up_bias = (None, None) if self.bias is None else self.bias.chunk(2)
        gated = packed_linear(x, gate_weight, gate_bias, activation="swish")
        return packed_linear_times(x, up_weight, up_bias, gated)

    def pack(self) -> None:
        """As `Linear.pack`, each half by itself: then both element-wise operations happen inside the products."""
        if self.weight is not None and can_pack(self.weight):
            gate, up = self.weight.data.chunk(2)
            self._packed_halves = pack_weight(gate), pack_weight(up)
            self.weight = None
