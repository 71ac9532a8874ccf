"""FlashAttention's side that runs anywhere: the cache's layout, and what the kernels are given.

The kernels need a CUDA device: `scripts/gpu_check.py` compares them with the reference there. Here a stand-in takes the
same arguments, and computes from them what they promise.
"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from miniserve.attention.base import AttentionVariant, LayerKVCache
from miniserve.attention.batch import AttnMetadata
from miniserve.attention.flash_attn import FLASH_BACKENDS, FlashBackend, FlashPlan, PackageFlash, TorchFlash
from miniserve.attention.probe import ProbeShape, why_not
from miniserve.attention.torch_ref import TorchBackend
from tests.attention.steps import MIXED, STEPS, Step, make_step

CPU = torch.device("cpu")


class StandIn(FlashBackend):
    """Takes what the kernels take, and attends by the reference's formula over the pages that the table names."""

    library = "stand-in"
    lacks = frozenset({"attention sinks"})

    @classmethod
    def missing(cls) -> str | None:
        return None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, variant: AttentionVariant, plan: FlashPlan) -> Tensor:
        check_arguments(query, keys, values, plan)
        num_blocks, block_size, num_kv_heads, head_dim = keys.shape
        both = torch.cat((keys, values), dim=2)
        pages = LayerKVCache(both.reshape(num_blocks, block_size, 2 * num_kv_heads, head_dim))
        nothing = torch.empty(0, dtype=torch.int64)
        query_lens = tuple(plan.query_start_loc.diff().tolist())
        metadata = AttnMetadata(
            slot_mapping=nothing,  # everything is in the pages already
            query_start_loc=plan.query_start_loc,
            seq_lens=plan.seq_lens,
            block_tables=plan.block_tables.long(),
            query_lens_host=query_lens,
            seq_lens_host=tuple(plan.seq_lens.tolist()),
            block_size=block_size,
        )
        no_new = torch.empty(0, 2 * num_kv_heads, head_dim, dtype=keys.dtype)
        output: Tensor = TorchBackend(self.dtype).plan(metadata)(query, no_new, variant, pages)
        return output


def check_arguments(query: Tensor, keys: Tensor, values: Tensor, plan: FlashPlan) -> None:
    """What FlashAttention's kernels insist on."""
    assert {plan.query_start_loc.dtype, plan.seq_lens.dtype, plan.key_start_loc.dtype} == {torch.int32}
    assert plan.block_tables.dtype == torch.int32 and plan.block_tables.is_contiguous()
    assert query.is_contiguous() and keys.shape == values.shape
    for pages in (keys, values):  # each page by itself lies in one piece
        assert pages.stride()[1:] == (pages.shape[2] * pages.shape[3], pages.shape[3], 1)
    assert plan.key_start_loc.tolist() == [0, *plan.seq_lens.cumsum(0).tolist()]
    assert plan.max_query_len == int(plan.query_start_loc.diff().max())
    assert plan.max_seq_len == plan.block_tables.shape[1] * keys.shape[1] >= int(plan.seq_lens.max())


def own_cache(step: Step) -> LayerKVCache:
    """The step's cache in FlashAttention's layout."""
    keys, values = step.cache.key_values.chunk(2, dim=2)
    return LayerKVCache(torch.stack((keys, values), dim=1))


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS.keys())
def test_steps(lengths: tuple[tuple[int, int], ...], options: dict[str, Any]) -> None:
    step, variant = make_step(lengths), AttentionVariant(scale=0.25, **options)
    cache = own_cache(step)
    num_blocks, block_size = step.cache.key_values.shape[:2]
    assert cache.key_values.shape == StandIn(torch.float32).cache_shape(num_blocks, block_size, 2, 16)
    output = StandIn(torch.float32).plan(step.metadata)(step.query, step.key_value, variant, cache)
    expected_cache = step.fresh_cache()
    expected = TorchBackend(torch.float32).plan(step.metadata)(step.query, step.key_value, variant, expected_cache)
    assert torch.equal(output, expected)
    assert torch.equal(torch.cat(cache.key_values.unbind(1), dim=2), expected_cache.key_values)


@pytest.mark.parametrize("library", FLASH_BACKENDS)
def test_what_a_library_lacks(library: type[FlashBackend]) -> None:
    """A layer with a soft cap or sinks must never silently get an answer without."""
    assert library.cannot_attend(AttentionVariant(scale=1.0, window=4)) is None
    sinks = library.cannot_attend(AttentionVariant(scale=1.0, sinks=torch.zeros(2)))
    assert sinks is not None and "attention sinks" in sinks
    capped = library.cannot_attend(AttentionVariant(scale=1.0, soft_cap=50.0))
    assert (capped is None) == (library is PackageFlash)


def test_torch_takes_the_arguments_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own checks pass, down to the operator, which needs a device."""
    import torch.nn.attention.varlen as varlen

    given: dict[str, Any] = {}

    def take(*arguments: Any, **options: Any) -> Tensor:
        given.update(query=arguments[0], max_lens=arguments[5:], **options)
        return torch.zeros_like(arguments[0])

    real = varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", take)
    step, variant = make_step(MIXED), AttentionVariant(scale=0.25, window=5)
    TorchFlash(torch.float32).plan(step.metadata)(step.query, step.key_value, variant, own_cache(step))
    assert given["window_size"] == (4, 0) and given["enable_gqa"] is True and given["scale"] == 0.25
    assert given["max_lens"] == (6, 32) and given["seqused_k"].tolist() == list(step.metadata.seq_lens_host)
    plan = TorchFlash(torch.float32).plan(step.metadata)
    plan(step.query, step.key_value, AttentionVariant(scale=0.25), own_cache(step))
    assert given["window_size"] == (-1, 0)
    monkeypatch.setattr(varlen, "varlen_attn", real)
    with pytest.raises(Exception, match=r"CPU|cpu|CUDA|backend"):
        TorchFlash(torch.float32).plan(step.metadata)(step.query, step.key_value, variant, own_cache(step))


@pytest.mark.parametrize(("window", "torch_window"), [(None, (-1, -1)), (5, (4, 0))])
def test_decodes_are_not_called_causal(
    monkeypatch: pytest.MonkeyPatch, window: int | None, torch_window: tuple[int, int]
) -> None:
    """Bug: with a bound behind each query, FlashAttention 2 read the keys once for each head that shares them."""
    import torch.nn.attention.varlen as varlen

    given: list[dict[str, Any]] = []

    def take(*arguments: Any, **options: Any) -> Tensor:
        given.append(options)
        return torch.zeros_like(arguments[0])

    monkeypatch.setattr(varlen, "varlen_attn", take)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=take))
    step, variant = make_step(STEPS["decode-unequal"]), AttentionVariant(scale=0.25, window=window)
    for library in (TorchFlash, PackageFlash):
        library(torch.float32).plan(step.metadata)(step.query, step.key_value, variant, own_cache(step))
    assert given[0]["window_size"] == torch_window
    # The package drops `causal` by itself where there is one token.
    assert given[1]["window_size"] == torch_window and given[1]["causal"] is True


# The probe


SHAPE = ProbeShape(num_heads=4, num_kv_heads=2, head_dim=16, block_size=16)
VARIANTS = [AttentionVariant(scale=0.25), AttentionVariant(scale=0.25, window=100)]


class Without(StandIn):
    """Kernels with a fault of their own."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, variant: AttentionVariant, plan: FlashPlan) -> Tensor:
        if self.library == "raises":
            raise RuntimeError("Paged KV cache block size must be divisible by 256\nat line 1")
        if self.library == "no decodes" and plan.max_query_len == 1:
            raise RuntimeError("no decodes")
        if self.library == "no long chunks" and plan.max_query_len > 128:
            raise RuntimeError("no long chunks")
        if self.library == "no window":
            variant = AttentionVariant(scale=variant.scale)
        output = super().attend(query, keys, values, variant, plan)
        return output * torch.nan if self.library == "nan" else output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 256])
def test_the_probe_finds_nothing_in_what_is_right(dtype: torch.dtype, block_size: int) -> None:
    shape = ProbeShape(num_heads=4, num_kv_heads=2, head_dim=16, block_size=block_size)
    assert why_not(StandIn(dtype), shape, VARIANTS, CPU) is None


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raises", "RuntimeError: Paged KV cache block size must be divisible by 256"),
        ("no window", "differs from the reference by .* \\(window 100\\)"),
        ("nan", "differs from the reference by nan"),
        ("no decodes", "no decodes"),
        ("no long chunks", "no long chunks"),
    ],
)
def test_the_probe_finds_faults(monkeypatch: pytest.MonkeyPatch, fault: str, reason: str) -> None:
    """Bug: kernels that serve steps of all kinds, but no step of decodes alone, were chosen."""
    monkeypatch.setattr(Without, "library", fault)
    refusal = why_not(Without(torch.float32), SHAPE, VARIANTS, CPU)
    assert refusal is not None
    assert re.search(reason, refusal), refusal


def test_a_large_window_is_tried_as_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: one longer than the tried step hid nothing, so nobody saw whether it was kept to."""
    monkeypatch.setattr(Without, "library", "no window")
    refusal = why_not(Without(torch.float32), SHAPE, [AttentionVariant(scale=0.25, window=4096)], CPU)
    assert refusal is not None and "window 100" in refusal
