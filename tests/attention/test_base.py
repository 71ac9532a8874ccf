"""New keys and values land in the slots of their tokens, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from miniserve.attention.base import AttentionBackend
from miniserve.attention.sdpa import SdpaBackend
from miniserve.attention.torch_ref import TorchBackend
from tests.attention.steps import MIXED, make_step


@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("backend", [TorchBackend, SdpaBackend])
def test_write(backend: type[AttentionBackend], block_size: int) -> None:
    step = make_step(MIXED, block_size=block_size)
    cache = step.fresh_cache()
    backend(scale=1.0).plan(step.metadata)(step.query, step.key, step.value, cache)
    slots = step.metadata.slot_mapping
    others = torch.ones(cache.keys.shape[0] * block_size, dtype=torch.bool)
    others[slots] = False
    for after, before, new in (
        (cache.keys, step.cache.keys, step.key),
        (cache.values, step.cache.values, step.value),
    ):
        assert torch.equal(after.flatten(0, 1)[slots], new)
        assert torch.equal(after.flatten(0, 1)[others], before.flatten(0, 1)[others])


def test_what_was_written_is_read_in_the_next_step() -> None:
    """Token by token gives the same as the whole prompt at once."""
    whole = make_step([(6, 6)])
    expected = TorchBackend(scale=0.25).plan(whole.metadata)(whole.query, whole.key, whole.value, whole.fresh_cache())
    cache = whole.fresh_cache()
    for position in range(6):
        row = slice(position, position + 1)
        metadata = replace(
            whole.metadata,
            slot_mapping=whole.metadata.slot_mapping[row],
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([position + 1], dtype=torch.int32),
            query_lens_host=(1,),
            seq_lens_host=(position + 1,),
        )
        output = SdpaBackend(scale=0.25).plan(metadata)(whole.query[row], whole.key[row], whole.value[row], cache)
        torch.testing.assert_close(output, expected[row], atol=1e-5, rtol=1e-5)
