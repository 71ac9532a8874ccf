"""The portable backend gives what the oracle gives, for every kind of group it makes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from miniserve.attention.base import AttentionBackend
from miniserve.attention.sdpa import SdpaBackend
from miniserve.attention.torch_ref import TorchBackend
from tests.attention.steps import MIXED, STEPS, Step, make_step

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def attend(backend: type[AttentionBackend], step: Step) -> Tensor:
    plan = backend(scale=step.query.shape[-1] ** -0.5).plan(step.metadata)
    return plan(step.query, step.key, step.value, step.fresh_cache())


def check(step: Step) -> None:
    tolerance = TOLERANCES[step.query.dtype]
    output = attend(SdpaBackend, step)
    assert output.dtype == step.query.dtype
    torch.testing.assert_close(output, attend(TorchBackend, step), atol=tolerance, rtol=tolerance)


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


def test_decodes_share_a_call_whatever_their_lengths() -> None:
    [group] = SdpaBackend(scale=1.0).plan(make_step(STEPS["decode-unequal"]).metadata).groups
    assert (group.batch, group.query_len, group.seq_len, group.rows) == (4, 1, 33, slice(0, 4))
    assert group.mask is not None and group.mask.sum(dim=-1).flatten().tolist() == [1, 33, 9, 16]


def test_equal_decodes_need_no_mask() -> None:
    [group] = SdpaBackend(scale=1.0).plan(make_step(STEPS["decode-equal"]).metadata).groups
    assert group.mask is None and not group.is_causal


def test_equal_prompts_share_a_call_that_gathers_nothing() -> None:
    groups = SdpaBackend(scale=1.0).plan(make_step(STEPS["equal-prompts-apart"]).metadata).groups
    prompts = groups[0]
    assert (prompts.batch, prompts.query_len) == (3, 6)
    assert isinstance(prompts.rows, Tensor)
    assert prompts.rows.tolist() == [*range(6), *range(7, 13), *range(16, 22)]
    assert prompts.block_ids is None and prompts.mask is None and prompts.is_causal
    assert len(groups) == 3  # and the decode, and the chunk with context
