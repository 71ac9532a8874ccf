"""The exact tensors of small steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from miniserve.core.schedule import ScheduledRequest
from miniserve.runner.input_builder import ModelInput, build_input
from miniserve.sampling_params import SamplingParams

CPU = torch.device("cpu")


def item(token_ids: Sequence[int], start: int, end: int, block_ids: Sequence[int]) -> ScheduledRequest:
    return ScheduledRequest("r", token_ids, start, end, block_ids, 1, SamplingParams(), samples=end == len(token_ids))


def build(*items: ScheduledRequest, block_size: int = 4) -> ModelInput:
    return build_input(items, block_size, CPU)


def test_one_prompt() -> None:
    inputs = build(item([10, 11, 12, 13, 14], 0, 5, [7, 2]))
    assert inputs.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4]
    assert inputs.metadata.slot_mapping.tolist() == [28, 29, 30, 31, 8]
    assert inputs.metadata.query_start_loc.tolist() == [0, 5]
    assert inputs.metadata.seq_lens.tolist() == [5]
    assert inputs.metadata.block_tables.tolist() == [[7, 2]]
    assert inputs.sample_rows.tolist() == [4]


def test_mixed_step() -> None:
    """A decode, a chunk in the middle of a prompt, and the end of a prompt: only the last known tokens sample."""
    inputs = build(
        item(list(range(100, 110)), 9, 10, [3, 1, 5]),
        item(list(range(200, 220)), 3, 6, [2, 9]),
        item([300, 301], 0, 2, [4]),
    )
    assert inputs.token_ids.tolist() == [109, 203, 204, 205, 300, 301]
    assert inputs.positions.tolist() == [9, 3, 4, 5, 0, 1]
    assert inputs.metadata.slot_mapping.tolist() == [21, 11, 36, 37, 16, 17]
    assert inputs.metadata.query_start_loc.tolist() == [0, 1, 4, 6]
    assert inputs.metadata.seq_lens.tolist() == [10, 6, 2]
    assert inputs.metadata.block_tables.tolist() == [[3, 1, 5], [2, 9, 0], [4, 0, 0]]
    assert inputs.metadata.query_lens_host == (1, 3, 2)
    assert inputs.metadata.seq_lens_host == (10, 6, 2)
    assert inputs.sample_rows.tolist() == [0, 5]
    assert inputs.first_rows == (0, 1, 4)


def test_decodes_lie_first_and_longest_first_while_rows_keep_the_order_of_the_step() -> None:
    inputs = build(
        item([300, 301, 302], 0, 3, [4]),
        item([400, 401], 1, 2, [5]),
        item([500, 501, 502], 2, 3, [6]),
    )
    assert inputs.token_ids.tolist() == [502, 401, 300, 301, 302]
    assert inputs.first_rows == (2, 1, 0)
    assert inputs.sample_rows.tolist() == [4, 1, 0]


def test_no_row_samples() -> None:
    inputs = build(item([1, 2, 3, 4], 0, 2, [1]))
    assert inputs.sample_rows.shape == (0,)
    assert inputs.sample_rows.dtype == torch.int64


def test_blocks_beyond_the_step_are_left_out() -> None:
    """A request may hold more blocks than this step reaches; the table is only as wide as the step."""
    inputs = build(item(list(range(20)), 2, 4, [6, 7, 8]))
    assert inputs.metadata.block_tables.tolist() == [[6]]
    assert inputs.metadata.slot_mapping.tolist() == [26, 27]


@pytest.mark.parametrize(("block_size", "slots"), [(1, [5, 3, 9]), (16, [80, 81, 82])])
def test_block_sizes(block_size: int, slots: list[int]) -> None:
    inputs = build(item([1, 2, 3], 0, 3, [5, 3, 9]), block_size=block_size)
    assert inputs.metadata.slot_mapping.tolist() == slots


def test_dtypes() -> None:
    """As `AttnMetadata` promises them: kernels do not convert."""
    inputs = build(item([1, 2], 0, 2, [1]))
    metadata = inputs.metadata
    assert {t.dtype for t in (inputs.token_ids, inputs.positions, inputs.sample_rows)} == {torch.int64}
    assert {t.dtype for t in (metadata.slot_mapping, metadata.block_tables)} == {torch.int64}
    assert {t.dtype for t in (metadata.query_start_loc, metadata.seq_lens)} == {torch.int32}
