"""The native backend: the compiled operator over a cache in its own layout. CPU only.

Besides attention it takes over what comes before it, the norm and rotation of heads: see `attend_projected`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miniserve.attention.base import AttentionBackend, AttentionPlan, AttentionVariant, LayerKVCache
from miniserve.attention.batch import AttnMetadata
from miniserve.kernels.layout import CHUNK, cache_shape
from miniserve.kernels.native import MAX_HEAD_DIM, HeadTransform, NativeKernels, PagedStep

_UNCHANGED = HeadTransform(rope=None)


@dataclass(frozen=True, slots=True)
class NativePlan(AttentionPlan):
    """The tensors of one step, as the operator takes them."""

    kernels: NativeKernels
    step: PagedStep

    def __call__(self, query: Tensor, key_value: Tensor, variant: AttentionVariant, cache: LayerKVCache) -> Tensor:
        """See `AttentionPlan`."""
        heads = torch.cat((query, key_value), dim=1)
        return self.attend_projected(heads, key_value.shape[1] // 2, _UNCHANGED, variant, cache)

    def attend_projected(
        self,
        heads: Tensor,
        num_kv_heads: int,
        transform: HeadTransform,
        variant: AttentionVariant,
        cache: LayerKVCache,
    ) -> Tensor:
        """Attention from the projection on: norm, rotation, cache and attention in one operator.

        Args:
            heads: [num_tokens, q | k | v heads, head_dim]; queries and keys are transformed in place.
            num_kv_heads: how many of them are keys, and how many values.
            transform: norms and rotation.
            variant: the layer's.
            cache: the layer's cache, written in place.

        Returns:
            [num_tokens, num_heads, head_dim].
        """
        return self.kernels.attend(
            heads,
            num_kv_heads,
            transform,
            cache.key_values,
            self.step,
            scale=variant.scale,
            soft_cap=variant.soft_cap,
            window=variant.window or 0,
            sinks=variant.sinks,
        )


class NativeBackend(AttentionBackend):
    """Attention by the compiled kernels."""

    name = "native"

    def plan(self, metadata: AttnMetadata) -> NativePlan:
        """Nothing to compute: the operator reads the metadata itself."""
        assert self.kernels is not None, "chosen only where there are kernels"
        step = PagedStep(metadata.query_start_loc, metadata.seq_lens, metadata.block_tables)
        return NativePlan(self.kernels, step)

    def cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """See `AttentionBackend`."""
        return cache_shape(num_blocks, block_size, num_kv_heads, head_dim, int8=self.cache_dtype == torch.int8)


def cannot_serve(block_size: int, head_dim: int) -> str | None:
    """Why the backend does not take blocks and heads of these sizes, or None."""
    if block_size % CHUNK:
        return f"--block-size {block_size} is no multiple of {CHUNK}"
    return f"heads of {head_dim} are larger than {MAX_HEAD_DIM}" if head_dim > MAX_HEAD_DIM else None
