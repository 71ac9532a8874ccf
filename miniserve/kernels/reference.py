"""What the compiled operators compute, in plain PyTorch: their twins, for tests and for whoever reads.

The layers do not call these: where there are no kernels they use what PyTorch is fastest at. Everything is computed in
fp32 and rounded to the result's dtype once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from miniserve.kernels.native import Norm
from miniserve.kernels.quantised import Grid, in_rows


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """x / sqrt(mean(x^2) + eps) x weight (Zhang and Sennrich, 2019), over the last dimension, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norm.eps) * norm.weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None) -> Tensor:
    """norm(x) W^T + b in fp32; the left side is rounded to the weight's dtype before, as the kernels do."""
    left = x if norm is None else rms_norm(x, norm)
    return F.linear(left.to(weight.dtype).float(), weight.float(), None if bias is None else bias.float())


def digits(rows: Tensor, num_digits: int) -> Tensor:
    """rows fp32 [num_rows, size], each rounded to whole multiples of 1/127 of its largest; of 1/(127 x 128) with 2."""
    steps = 127.0 if num_digits == 1 else 127.0 * 128.0
    size = rows.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(size > 0, torch.full_like(size, steps) / size, 0.0)
    return (rows * inverse).round() * (size / steps)


def linear_quantised(
    x: Tensor, grid: Grid, bias: Tensor | None = None, norm: Norm | None = None, *, num_digits: int
) -> Tensor:
    """norm(x) W^T + b in fp32, with the left side rounded as `digits`, and W of a grid."""
    left = digits(x.float() if norm is None else rms_norm(x, norm), num_digits)
    return F.linear(left.double(), grid.values.double(), None if bias is None else bias.double()).float()


def gate(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None, *, activation: str = "silu"
) -> Tensor:
    """activation(gate) x up (Shazeer, 2020), with `weight` and `bias` of gate | up rows."""
    gates, up = linear(x, weight, bias, norm).chunk(2, dim=-1)
    return ACTIVATIONS[activation](gates, up)


def _silu(gates: Tensor, up: Tensor) -> Tensor:
    return F.silu(gates) * up


def _gelu_tanh(gates: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gates, approximate="tanh") * up


def _clamped_swiglu(gates: Tensor, up: Tensor) -> Tensor:
    """Of gpt-oss."""
    gates = gates.clamp(max=7.0)
    return (up.clamp(-7.0, 7.0) + 1.0) * gates * torch.sigmoid(1.702 * gates)


ACTIVATIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"silu": _silu, "gelu_tanh": _gelu_tanh, "clamped_swiglu": _clamped_swiglu}
)


def feed_forward(
    residual: Tensor,
    gate_up: Tensor,
    down: Tensor,
    norm: Norm | None = None,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """residual + down(activation(gate) x up of norm(residual)) in fp32; what is between is rounded to their dtype."""
    gated = gate(residual, gate_up, gate_up_bias, norm, activation=activation)
    return residual + linear(gated, down, down_bias)


def add(residual: Tensor, x: Tensor, norm: Norm | None = None, scale: float = 1.0) -> Tensor:
    """residual + scale x norm(x), in fp32."""
    return residual + scale * (x.float() if norm is None else rms_norm(x, norm))


def transform_heads(heads: Tensor, norm: Norm | None, rope: Tensor | None, positions: Tensor) -> Tensor:
    """heads [num_tokens, num_heads, head_dim], normalised and rotated: see `HeadTransform`. In their dtype."""
    x = heads.float() if norm is None else rms_norm(heads, norm)
    if rope is not None:
        rotary_dim = rope.shape[2]
        cos, sin = rope[positions].unsqueeze(2).unbind(dim=1)  # [num_tokens, 1, rotary_dim]
        part = x[..., :rotary_dim]
        x = torch.cat((part * cos + part.roll(rotary_dim // 2, dims=-1) * sin, x[..., rotary_dim:]), dim=-1)
    return x.to(heads.dtype)


def as_int8(heads: Tensor) -> Tensor:
    """Keys or values [num_tokens, num_kv_heads, head_dim] as a cache of int8 gives them back, fp32."""
    return in_rows(heads.flatten(0, 1)).values.view(heads.shape)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    soft_cap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a request's last tokens over the whole of it, in fp32.

    Args:
        query: [num_new_tokens, num_heads, head_dim].
        keys, values: [seq_len, num_kv_heads, head_dim], each head shared by a group of query heads.
        scale, soft_cap, window, sinks: see `NativeKernels.attend`.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    last = torch.arange(len(keys) - len(query), len(keys))[:, None]
    key = torch.arange(len(keys))
    visible = (key <= last) & (key > last - window if window else True)
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(query), 1)), dim=-1)
    probs = scores.softmax(dim=-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", probs, values)
