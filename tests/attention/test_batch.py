"""The metadata's derived numbers, and the mask that all backends share."""

from __future__ import annotations

import torch

from miniserve.attention.batch import causal_mask
from tests.attention.steps import make_step


def test_lengths() -> None:
    metadata = make_step([(1, 9), (6, 6), (4, 20)]).metadata
    assert (metadata.num_reqs, metadata.max_query_len, metadata.max_seq_len) == (3, 6, 20)


def test_causal_mask_is_aligned_to_the_end() -> None:
    """Bug: with a mask aligned to the start, the new tokens after a cached prefix saw too little."""
    assert causal_mask(2, 4, torch.device("cpu")).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert causal_mask(3, 3, torch.device("cpu")).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
