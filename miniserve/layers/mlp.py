"""SwiGLU feed-forward (Shazeer, 2020): down(silu(gate(x)) x up(x)), with gate and up in one matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from miniserve.layers.linear import Linear, pack_weight, packed_linear, packed_linear_times
from miniserve.layers.norm import RMSNorm


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

    def forward(self, residual: Tensor, norm: RMSNorm) -> None:
        """residual, fp32 [num_tokens, hidden_size], gets the feed-forward of its normalised self added."""
        gate_up, down = self.gate_up.native, self.down.native
        if gate_up is not None and down is not None:
            gate_up.feed_forward_(residual, norm.native, down)
        else:
            self.down.add_to_(residual, self.gate_up(residual, norm))


class GateUp(Linear):
    """silu(gate(x)) x up(x): [num_tokens, in_features] -> [num_tokens, out_features], one weight of gate | up rows."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(in_features, 2 * out_features, bias=bias, dtype=dtype, device=device)
        self._packed_halves: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features]; `norm` as in `Linear`."""
        if self._native is not None:
            return self._native.silu_gate(x, None if norm is None else norm.native)
        x = x if norm is None else norm(x, self.dtype)
        if self._packed_halves is None:
            gate, up = self._product(x).chunk(2, dim=-1)
            return F.silu(gate, inplace=True) * up
        gate_weight, up_weight = self._packed_halves
        gate_bias, up_bias = (None, None) if self.bias is None else self.bias.chunk(2)
        gated = packed_linear(x, gate_weight, gate_bias, activation="swish")
        return packed_linear_times(x, up_weight, up_bias, gated)

    _is_gate = True

    def _pack_for_onednn(self, weight: Tensor) -> None:
        """Each half by itself: then both element-wise operations happen inside the products."""
        gate, up = weight.chunk(2)
        self._packed_halves = pack_weight(gate), pack_weight(up)
