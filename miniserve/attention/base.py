"""What an attention backend is: `plan` once a step, then call the plan once a layer.

A plan writes the new keys and values into the layer's cache and attends over all of the sequence, causally. Backends
differ in speed only: every one gives what `torch_ref` gives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from miniserve.attention.batch import AttnMetadata
from miniserve.kernels.native import NativeKernels


@dataclass(frozen=True, slots=True)
class LayerKVCache:
    """The paged keys and values of one layer.

    A token's keys and values lie side by side, so that one copy writes both, and one reads both.

    Attributes:
        key_values: [num_blocks, block_size, 2 x num_kv_heads, head_dim]; the heads of the keys, then of the values. A
            backend may have another layout within a block (`AttentionBackend.cache_shape`), and then only that backend
            reads and writes it.
    """

    key_values: Tensor

    def write(self, slot_mapping: Tensor, key_value: Tensor) -> None:
        """Store the new tokens' `key_value` [num_tokens, 2 x num_kv_heads, head_dim] in their slots."""
        self.key_values.flatten(0, 1).index_copy_(0, slot_mapping, key_value)

    def gather(self, block_ids: Tensor) -> Tensor:
        """The tokens of `block_ids` [n], in order: [n x block_size, 2 x num_kv_heads, head_dim]."""
        return self.key_values.index_select(0, block_ids).flatten(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionVariant:
    """What sets the attention of one layer apart from that of another, or of another model.

    Attributes:
        scale: of the scores.
        window: how many tokens a query sees, its own included (Beltagy et al., 2020); None for all.
        soft_cap: scores become soft_cap x tanh(score / soft_cap) (Gemma 2); 0 for none.
        sinks: fp32 [num_heads], a score of each head that takes part in the softmax but has no value (gpt-oss).
    """

    scale: float
    window: int | None = None
    soft_cap: float = 0.0
    sinks: Tensor | None = None


class AttentionPlan(ABC):
    """Attention of one step, ready to be applied to each layer in turn."""

    @abstractmethod
    def __call__(self, query: Tensor, key_value: Tensor, variant: AttentionVariant, cache: LayerKVCache) -> Tensor:
        """Write `key_value` to `cache` and attend.

        Args:
            query: [num_tokens, num_heads, head_dim].
            key_value: [num_tokens, 2 x num_kv_heads, head_dim] of the same new tokens, keys first.
            variant: the layer's.
            cache: the layer's cache, written in place.

        Returns:
            [num_tokens, num_heads, head_dim], in the dtype of `query`.
        """


class AttentionBackend(ABC):
    """A way to compute attention over the paged cache.

    `dtype` is that of queries, keys and values; `kernels` are the compiled ones, which only the native backend needs;
    `cache_dtype`, if not `dtype`, is for backends that can convert.
    """

    name: ClassVar[str]
    # Whether a plan of one token a request only computes on the device, so that a CUDA graph may hold it.
    can_capture: ClassVar[bool] = False

    def __init__(
        self,
        dtype: torch.dtype,
        kernels: NativeKernels | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.dtype = dtype
        self.kernels = kernels
        self.cache_dtype = cache_dtype or dtype

    @property
    def label(self) -> str:
        """Its name, as people read it."""
        return self.name

    @abstractmethod
    def plan(self, metadata: AttnMetadata) -> AttentionPlan:
        """Whatever is the same for all layers of a step: gather indices, masks."""

    def cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """The shape of a layer's cache; its first dimension is the blocks, whatever the layout of one is."""
        return (num_blocks, block_size, 2 * num_kv_heads, head_dim)
