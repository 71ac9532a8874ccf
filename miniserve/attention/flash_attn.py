"""FlashAttention (Dao et al., 2022) over the paged cache, on CUDA: torch's own kernels, or the flash-attn package's.

One call serves all requests of a step, whatever their lengths. The cache holds the keys of a block, then its values,
each as the kernels take them: [block_size, num_kv_heads, head_dim].
"""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from miniserve.attention.base import AttentionBackend, AttentionPlan, AttentionVariant, LayerKVCache
from miniserve.attention.batch import AttnMetadata


@dataclass(frozen=True, slots=True)
class FlashPlan(AttentionPlan):
    """The tensors of one step, as the kernels take them. Everything is computed on the device, where graphs replay it.

    Attributes:
        blocks, offsets: int64 [num_tokens], where each new token's keys and values go.
        query_start_loc, seq_lens: as in `AttnMetadata`.
        key_start_loc: int32 [num_reqs + 1]; request i has the tokens [i] to [i + 1] of all requests' tokens.
        block_tables: int32 [num_reqs, max_blocks].
        max_query_len, max_seq_len: bounds; the second is what the table has room for.
    """

    backend: FlashBackend
    blocks: Tensor
    offsets: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    key_start_loc: Tensor
    block_tables: Tensor
    max_query_len: int
    max_seq_len: int

    def __call__(self, query: Tensor, key_value: Tensor, variant: AttentionVariant, cache: LayerKVCache) -> Tensor:
        """See `AttentionPlan`."""
        pairs = key_value.reshape(len(key_value), 2, -1, key_value.shape[2])  # keys and values
        cache.key_values[self.blocks, :, self.offsets] = pairs
        keys, values = cache.key_values.unbind(1)  # [num_blocks, block_size, num_kv_heads, head_dim]
        return self.backend.attend(query.contiguous(), keys, values, variant, self)


class FlashBackend(AttentionBackend):
    """What both libraries have in common."""

    name = "flash_attn"
    can_capture = True
    library: ClassVar[str]
    lacks: ClassVar[frozenset[str]]

    @property
    def label(self) -> str:
        """See `AttentionBackend`."""
        return f"{self.name} ({self.library})"

    def plan(self, metadata: AttnMetadata) -> FlashPlan:
        """Indices of the cache, in the types that the kernels take."""
        return FlashPlan(
            backend=self,
            blocks=metadata.slot_mapping // metadata.block_size,
            offsets=metadata.slot_mapping % metadata.block_size,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            key_start_loc=F.pad(metadata.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            block_tables=metadata.block_tables.int(),
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.block_tables.shape[1] * metadata.block_size,
        )

    def cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """See `AttentionBackend`."""
        return (num_blocks, 2, block_size, num_kv_heads, head_dim)

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Why the library is not there, or None."""

    @abstractmethod
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, variant: AttentionVariant, plan: FlashPlan) -> Tensor:
        """Causal attention of `query` [num_tokens, num_heads, head_dim] over blocks of keys and values."""

    @classmethod
    def cannot_attend(cls, variant: AttentionVariant) -> str | None:
        """Why such a layer cannot be served, or None."""
        asked = {"soft caps": variant.soft_cap != 0.0, "attention sinks": variant.sinks is not None}
        lacking = [name for name, is_asked in asked.items() if is_asked and name in cls.lacks]
        return f"it has no {' and no '.join(lacking)}, and the model needs them" if lacking else None


class TorchFlash(FlashBackend):
    """The kernels that come with torch: `torch.nn.attention.varlen`, with a block table from 2.11 on."""

    library = "torch"
    lacks = frozenset({"soft caps", "attention sinks"})

    @classmethod
    def missing(cls) -> str | None:
        """See `FlashBackend`."""
        if importlib.util.find_spec("torch.nn.attention.varlen") is None:
            return "this torch has no torch.nn.attention.varlen"
        return None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, variant: AttentionVariant, plan: FlashPlan) -> Tensor:
        """See `FlashBackend`."""
        from torch.nn.attention.varlen import varlen_attn

        output = varlen_attn(
            query,
            keys,
            values,
            plan.query_start_loc,
            plan.key_start_loc,
            plan.max_query_len,
            plan.max_seq_len,
            scale=variant.scale,
            # One new token a request has nothing behind it. Told so, the kernels compute the heads that share keys
            # together, and split long sequences.
            window_size=_window(variant, -1 if plan.max_query_len == 1 else 0),
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=plan.seq_lens,
            block_table=plan.block_tables,
        )
        assert isinstance(output, Tensor), "nothing else is asked for"
        return output


class PackageFlash(FlashBackend):
    """The kernels of the flash-attn package."""

    library = "flash-attn package"
    lacks = frozenset({"attention sinks"})

    @classmethod
    def missing(cls) -> str | None:
        """See `FlashBackend`."""
        return None if importlib.util.find_spec("flash_attn") is not None else "it is not installed"

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, variant: AttentionVariant, plan: FlashPlan) -> Tensor:
        """See `FlashBackend`."""
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        output: Tensor = flash_attn_varlen_func(
            query,
            keys,
            values,
            plan.query_start_loc,
            plan.key_start_loc,
            plan.max_query_len,
            plan.max_seq_len,
            softmax_scale=variant.scale,
            causal=True,
            window_size=_window(variant, -1),  # `causal` says the rest
            softcap=variant.soft_cap,
            block_table=plan.block_tables,
        )
        return output


def _window(variant: AttentionVariant, behind: int) -> tuple[int, int]:
    """How many tokens before and behind it a query sees; -1 for all. `behind` is for layers without a window."""
    return (-1, behind) if variant.window is None else (variant.window - 1, 0)


FLASH_BACKENDS: tuple[type[FlashBackend], ...] = (TorchFlash, PackageFlash)
