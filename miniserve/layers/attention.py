"""The attention block of a layer: project, normalise and rotate heads, attend through the paged cache, project back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from miniserve.attention.base import AttentionPlan, AttentionVariant, LayerKVCache
from miniserve.attention.native import NativePlan
from miniserve.kernels.native import HeadTransform
from miniserve.layers.branch import Branch
from miniserve.layers.linear import Linear, parameter
from miniserve.layers.norm import RMSNorm
from miniserve.layers.rotary import Rope, rotate_

QKNorm = Literal["none", "heads", "projection"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Sizes and switches of a layer's attention; see `ModelConfig`, whose fields these are."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    o_bias: bool
    qk_norm: QKNorm
    qk_norm_eps: float
    scale: float
    window: int | None
    soft_cap: float
    sinks: bool


class Sinks(nn.Module):
    """A learnt score for each head, whose share of the softmax goes to no token."""

    def __init__(self, num_heads: int, *, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(num_heads, dtype=torch.float32, device=device)


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, hidden_size: int, shape: AttentionShape, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.qkv = Linear(hidden_size, self.q_size + 2 * kv_size, bias=shape.qkv_bias, dtype=dtype, device=device)
        self.o = Linear(self.q_size, hidden_size, bias=shape.o_bias, dtype=dtype, device=device)
        self.of_heads = shape.qk_norm == "heads"
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if shape.qk_norm != "none":
            q_norm_size, k_norm_size = (self.head_dim, self.head_dim) if self.of_heads else (self.q_size, kv_size)
            self.q_norm = RMSNorm(q_norm_size, eps=shape.qk_norm_eps, device=device)
            self.k_norm = RMSNorm(k_norm_size, eps=shape.qk_norm_eps, device=device)
        self.sinks = Sinks(shape.num_heads, device=device) if shape.sinks else None
        self.variant = AttentionVariant(
            scale=shape.scale,
            window=shape.window,
            soft_cap=shape.soft_cap,
            sinks=None if self.sinks is None else self.sinks.weight.data,
        )

    def forward(
        self,
        residual: Tensor,
        branch: Branch,
        rope: Rope | None,
        plan: AttentionPlan,
        cache: LayerKVCache,
    ) -> None:
        """residual, fp32 [num_tokens, hidden_size], gets its attention added, through the norms of `branch`.

        `cache` gets the new keys and values.
        """
        projected = self.qkv(residual, branch.norm)  # [num_tokens, q | k | v]
        if self.q_norm is not None and self.k_norm is not None and not self.of_heads:
            kernels = plan.kernels if isinstance(plan, NativePlan) else None
            self.q_norm.normalise_columns_(projected, 0, kernels)
            self.k_norm.normalise_columns_(projected, self.q_size, kernels)
        heads = projected.view(residual.shape[0], -1, self.head_dim)  # q | k | v heads
        if isinstance(plan, NativePlan):
            attended = plan.attend_projected(heads, self.num_kv_heads, self._transform(rope), self.variant, cache)
        else:
            attended = self._attend(heads, rope, plan, cache)
        branch.add_(residual, self.o, attended.flatten(1))

    def _attend(self, heads: Tensor, rope: Rope | None, plan: AttentionPlan, cache: LayerKVCache) -> Tensor:
        query, key_value = heads[:, : self.num_heads], heads[:, self.num_heads :]
        if self.q_norm is not None and self.k_norm is not None and self.of_heads:
            key = key_value[:, : self.num_kv_heads]
            query.copy_(self.q_norm(query, heads.dtype))
            key.copy_(self.k_norm(key, heads.dtype))
        if rope is not None:
            rotate_(heads[:, : self.num_heads + self.num_kv_heads], *rope.cos_sin)
        return plan(query, key_value, self.variant, cache)

    def _transform(self, rope: Rope | None) -> HeadTransform:
        """What the compiled operator does to the heads itself."""
        table = None if rope is None else rope.table
        if self.q_norm is None or self.k_norm is None or not self.of_heads:
            return HeadTransform(table)
        q_norm, k_norm = self.q_norm.native, self.k_norm.native
        return HeadTransform(table, q_norm.weight, k_norm.weight, q_norm.eps)
