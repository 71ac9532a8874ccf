"""The attention block of a layer: project, normalise and rotate heads, attend through the paged cache, project back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from miniserve.attention.base import AttentionPlan, LayerKVCache
from miniserve.attention.native import NativePlan
from miniserve.kernels.native import HeadTransform
from miniserve.layers.linear import Linear
from miniserve.layers.norm import RMSNorm
from miniserve.layers.rotary import Rope, rotate_


class Attention(nn.Module):
    """Grouped-query attention; with `qk_norm_eps`, an RMSNorm over each head of q and k before RoPE."""

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm_eps: float | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        qkv_size = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv = Linear(hidden_size, qkv_size, bias=qkv_bias, dtype=dtype, device=device)
        self.o = Linear(num_heads * head_dim, hidden_size, bias=o_bias, dtype=dtype, device=device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, eps=qk_norm_eps, device=device)
            self.k_norm = RMSNorm(head_dim, eps=qk_norm_eps, device=device)

    def forward(self, residual: Tensor, norm: RMSNorm, rope: Rope, plan: AttentionPlan, cache: LayerKVCache) -> None:
        """residual, fp32 [num_tokens, hidden_size], gets the attention of its normalised self added.

        `cache` gets the new keys and values.
        """
        heads = self.qkv(residual, norm).view(residual.shape[0], -1, self.head_dim)  # q | k | v heads
        if isinstance(plan, NativePlan):
            attended = plan.attend_projected(heads, self.num_kv_heads, self._transform(rope), cache)
        else:
            attended = self._attend(heads, rope, plan, cache)
        self.o.add_to_(residual, attended.flatten(1))

    def _attend(self, heads: Tensor, rope: Rope, plan: AttentionPlan, cache: LayerKVCache) -> Tensor:
        query, key_value = heads[:, : self.num_heads], heads[:, self.num_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            key = key_value[:, : self.num_kv_heads]
            query.copy_(self.q_norm(query, heads.dtype))
            key.copy_(self.k_norm(key, heads.dtype))
        rotate_(heads[:, : self.num_heads + self.num_kv_heads], *rope.cos_sin)
        return plan(query, key_value, cache)

    def _transform(self, rope: Rope) -> HeadTransform:
        """What the compiled operator does to the heads itself."""
        if self.q_norm is None or self.k_norm is None:
            return HeadTransform(rope.table)
        q_norm, k_norm = self.q_norm.native, self.k_norm.native
        return HeadTransform(rope.table, q_norm.weight, k_norm.weight, q_norm.eps)
