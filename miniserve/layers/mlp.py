"""Gated feed-forward (Shazeer, 2020): down(activation(gate(x)) x up(x)), with gate and up in one matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from miniserve.layers.branch import Branch
from miniserve.layers.linear import Linear, pack_weight, packed_linear, packed_linear_times
from miniserve.layers.norm import RMSNorm

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]

# What clamped_swiglu's numbers are in gpt-oss: the largest gate, and the steepness of its sigmoid.
_SWIGLU_LIMIT, _SWIGLU_ALPHA = 7.0, 1.702
# In oneDNN's names, those that it computes within a product.
_FUSED = {"silu": "swish", "gelu_tanh": "gelu_tanh"}


class MLP(nn.Module):
    """The gated feed-forward block of a layer."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.gate_up = GateUp(
            hidden_size, intermediate_size, activation=activation, bias=bias, dtype=dtype, device=device
        )
        self.down = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, device=device)

    def forward(self, residual: Tensor, branch: Branch) -> None:
        """residual, fp32 [num_tokens, hidden_size], gets its feed-forward added, through the norms of `branch`."""
        gate_up, down = self.gate_up.native, self.down.native
        if gate_up is not None and down is not None and branch.norm is not None and branch.only_adds:
            gate_up.feed_forward_(residual, branch.norm.native, down, self.gate_up.activation)
        else:
            branch.add_(residual, self.down, self.gate_up(residual, branch.norm))


class GateUp(Linear):
    """activation(gate(x)) x up(x): [num_tokens, in_features] -> [num_tokens, out_features].

    One weight of gate | up rows.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Activation,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, 2 * out_features, bias=bias, dtype=dtype, device=device)
        self.activation = activation
        self._packed_halves: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features]; `norm` as in `Linear`."""
        if self._native is not None:
            return self._native.gate(x, None if norm is None else norm.native, self.activation)
        x = self._normalised(x, norm)
        if self._packed_halves is None:
            gate, up = self._product(x).chunk(2, dim=-1)
            return _GATES[self.activation](gate, up)
        gate_weight, up_weight = self._packed_halves
        gate_bias, up_bias = (None, None) if self.bias is None else self.bias.chunk(2)
        gated = packed_linear(x, gate_weight, gate_bias, activation=_FUSED[self.activation])
        return packed_linear_times(x, up_weight, up_bias, gated)

    _is_gate = True

    def _pack_for_onednn(self, weight: Tensor) -> None:
        """Each half by itself, where then both element-wise operations happen inside the products."""
        if self.activation in _FUSED:
            gate, up = weight.chunk(2)
            self._packed_halves = pack_weight(gate), pack_weight(up)
        else:
            super()._pack_for_onednn(weight)


def _silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate, inplace=True) * up


def _gelu_tanh_gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Of gpt-oss: both clamped, a sigmoid of its own, and up is around one."""
    gate = gate.clamp(max=_SWIGLU_LIMIT)
    up = up.clamp(-_SWIGLU_LIMIT, _SWIGLU_LIMIT)
    return (up + 1) * gate * torch.sigmoid(_SWIGLU_ALPHA * gate)


_GATES: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": _silu_gate,
    "gelu_tanh": _gelu_tanh_gate,
    "clamped_swiglu": _clamped_swiglu,
}
