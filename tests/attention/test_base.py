"""New keys and values land in the slots of their tokens, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from miniserve.attention.base import AttentionBackend, AttentionVariant
from miniserve.attention.sdpa import SdpaBackend
from miniserve.attention.torch_ref import TorchBackend
from tests.attention.steps import MIXED, make_step

VARIANT = AttentionVariant(scale=0.25)


@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("backend", [TorchBackend, SdpaBackend])
def test_write(backend: type[AttentionBackend], block_size: int) -> None:
    step = make_step(MIXED, block_size=block_size)
    cache = step.fresh_cache()
    backend(torch.float32).plan(step.metadata)(step.query, step.key_value, VARIANT, cache)
    slots = step.metadata.slot_mapping
    after, before = cache.key_values.flatten(0, 1), step.cache.key_values.flatten(0, 1)
    others = torch.ones(len(after), dtype=torch.bool)
    others[slots] = False
    assert torch.equal(after[slots], step.key_value)
    assert torch.equal(after[others], before[others])


def test_what_was_written_is_read_in_the_next_step() -> None:
    """Token by token gives the same as the whole prompt at once."""
    whole = make_step([(6, 6)])
    expected = TorchBackend(torch.float32).plan(whole.metadata)(
        whole.query, whole.key_value, VARIANT, whole.fresh_cache()
    )
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
        output = SdpaBackend(torch.float32).plan(metadata)(whole.query[row], whole.key_value[row], VARIANT, cache)
        torch.testing.assert_close(output, expected[row], atol=1e-5, rtol=1e-5)
