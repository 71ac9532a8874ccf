"""The step that memory is planned for."""

from __future__ import annotations

import pytest

from miniserve.runner.largest_step import largest_step


@pytest.mark.parametrize(
    ("num_requests", "num_tokens", "max_model_len", "lengths"),
    [
        (1, 1024, 4096, [1024]),
        (3, 10, 4096, [3, 3, 4]),
        (16, 4, 4096, [1, 1, 1, 1]),
        (2, 1000, 100, [100, 100]),
    ],
)
def test_lengths(num_requests: int, num_tokens: int, max_model_len: int, lengths: list[int]) -> None:
    step = largest_step(num_requests=num_requests, num_tokens=num_tokens, max_model_len=max_model_len, block_size=16)
    assert [item.num_new_tokens for item in step.scheduled] == lengths
    assert all(item.samples and item.start == 0 for item in step.scheduled)
    blocks = [block for item in step.scheduled for block in item.block_ids]
    assert blocks == list(range(1, 1 + sum(-(-length // 16) for length in lengths)))
