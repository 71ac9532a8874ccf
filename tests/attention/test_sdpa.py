"""The portable backend gives what the oracle gives, for every kind of group it makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from miniserve.attention.base import AttentionBackend, AttentionVariant
from miniserve.attention.sdpa import SdpaBackend
from miniserve.attention.torch_ref import TorchBackend
from tests.attention.steps import MIXED, STEPS, Step, make_step

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def attend(backend: type[AttentionBackend], step: Step, variant: AttentionVariant) -> Tensor:
    plan = backend(step.query.dtype).plan(step.metadata)
    return plan(step.query, step.key_value, variant, step.fresh_cache())


def check(step: Step, **options: Any) -> None:
    tolerance = TOLERANCES[step.query.dtype]
    variant = AttentionVariant(scale=step.query.shape[-1] ** -0.5, **options)
    output = attend(SdpaBackend, step, variant)
    assert output.dtype == step.query.dtype
    torch.testing.assert_close(output, attend(TorchBackend, step, variant), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS.keys())
def test_block_sizes(lengths: tuple[tuple[int, int], ...], block_size: int) -> None:
    check(make_step(lengths, block_size=block_size))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS.keys())
def test_heads(lengths: tuple[tuple[int, int], ...], num_heads: int, num_kv_heads: int) -> None:
    check(make_step(lengths, num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_head_dims_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    check(make_step(MIXED, head_dim=head_dim, dtype=dtype))


@st.composite
def random_lengths(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    """Few different lengths, so that groups of several requests are common."""
    length = st.tuples(st.sampled_from([1, 1, 2, 5]), st.sampled_from([0, 0, 3, 8, 13]))
    return tuple((query, query + context) for query, context in draw(st.lists(length, min_size=1, max_size=8)))


@settings(deadline=None, max_examples=50)
@given(lengths=random_lengths(), block_size=st.sampled_from([1, 4, 16]), seed=st.integers(0, 5))
def test_any_step(lengths: tuple[tuple[int, int], ...], block_size: int, seed: int) -> None:
    check(make_step(lengths, block_size=block_size, seed=seed))


VARIANTS: dict[str, dict[str, Any]] = {
    "soft-cap": {"soft_cap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "all": {"soft_cap": 2.0, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0]), "window": 5},
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS.keys())
def test_variants(lengths: tuple[tuple[int, int], ...], options: dict[str, Any], dtype: torch.dtype) -> None:
    check(make_step(lengths, dtype=dtype), **options)


@pytest.mark.parametrize("window", [1, 2, 5, 6, 7, 20, 21, 22, 100])
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS.keys())
def test_windows(lengths: tuple[tuple[int, int], ...], window: int) -> None:
    check(make_step(lengths), window=window)


def test_a_mask_is_made_once_for_each_window() -> None:
    """Most layers of a model share a window: its mask must not be made again in each of them."""
    [group] = SdpaBackend(torch.float32).plan(make_step(STEPS["one-prompt-with-context"]).metadata).groups
    assert group.mask(4, torch.float32, CPU) is group.mask(4, torch.float32, CPU)
    assert group.mask(None, torch.float32, CPU) is not group.mask(4, torch.float32, CPU)


def test_decodes_share_a_call_whatever_their_lengths() -> None:
    [group] = SdpaBackend(torch.float32).plan(make_step(STEPS["decode-longest-first"]).metadata).groups
    assert (group.batch, group.query_len, group.seq_len, group.rows) == (4, 1, 33, slice(0, 4))
    mask = group.mask(None, torch.float32, CPU)
    assert mask is not None
    assert mask.isfinite().sum(dim=-1).flatten().tolist() == [33, 16, 9, 1]


def test_equal_decodes_need_no_mask() -> None:
    [group] = SdpaBackend(torch.float32).plan(make_step(STEPS["decode-equal"]).metadata).groups
    assert group.mask(None, torch.float32, CPU) is None


def test_equal_prompts_share_a_call_that_gathers_nothing() -> None:
    groups = SdpaBackend(torch.float32).plan(make_step(STEPS["equal-prompts-apart"]).metadata).groups
    [prompts] = [group for group in groups if group.query_len == 6 and group.block_ids is None]
    assert (prompts.batch, prompts.query_len) == (3, 6)
    assert isinstance(prompts.rows, Tensor)
    assert prompts.rows.tolist() == [*range(6), *range(7, 13), *range(16, 22)]
    assert prompts.block_ids is None and prompts.is_causal(None) and not prompts.is_causal(5)
    assert len(groups) == 3  # and the decode, and the chunk with context


def test_decodes_of_very_different_lengths_are_not_padded_to_the_longest() -> None:
    """One request of 900 tokens among short ones would make each of them read 900: they get a call of their own."""
    lengths = ((1, 40), (1, 900), (1, 35), (1, 60), (1, 880))
    step = make_step(lengths)
    groups = SdpaBackend(torch.float32).plan(step.metadata).groups
    assert sorted((group.batch, group.seq_len) for group in groups) == [(2, 900), (3, 60)]
    check(step)
