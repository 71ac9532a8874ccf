"""What an attention backend is: `plan` once a step, then call the plan once a layer.

A plan writes the new keys and values into the layer's cache and attends over all of the sequence, causally. Backends
differ in speed only: every one gives what `torch_ref` gives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from miniserve.attention.batch import AttnMetadata


@dataclass(frozen=True, slots=True)
class LayerKVCache:
    """The paged keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor

    def write(self, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
        """Store the new tokens' `key` and `value` [num_tokens, num_kv_heads, head_dim] in their slots."""
        self.keys.flatten(0, 1).index_copy_(0, slot_mapping, key)
        self.values.flatten(0, 1).index_copy_(0, slot_mapping, value)


class AttentionPlan(ABC):
    """Attention of one step, ready to be applied to each layer in turn."""

    @abstractmethod
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerKVCache) -> Tensor:
        """Write `key`, `value` to `cache` and attend.

        Args:
            query: [num_tokens, num_heads, head_dim].
            key, value: [num_tokens, num_kv_heads, head_dim] of the same new tokens.
            cache: the layer's cache, written in place.

        Returns:
            [num_tokens, num_heads, head_dim], in the dtype of `query`.
        """


class AttentionBackend(ABC):
    """A way to compute attention over the paged cache. Scores are scaled by `scale` (head_dim ** -0.5)."""

    name: ClassVar[str]

    def __init__(self, scale: float) -> None:
        self.scale = scale

    @abstractmethod
    def plan(self, metadata: AttnMetadata) -> AttentionPlan:
        """Whatever is the same for all layers of a step: gather indices, masks."""
