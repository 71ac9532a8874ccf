"""From what the scheduler chose to the tensors of one step. Pure: no state, no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from miniserve.attention.batch import AttnMetadata
from miniserve.core.schedule import ScheduledRequest
from miniserve.kernels.transfer import to_device


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The inputs of one step.

    Attributes:
        token_ids, positions: int64 [num_tokens], the new tokens of one request after the other.
        metadata: where their KV goes and what they attend to.
        sample_rows: int64 [num_samples], the token of each sampling request whose logits are needed.
        first_rows: where on the token axis each scheduled request begins, in the order of the step.
    """

    token_ids: Tensor
    positions: Tensor
    metadata: AttnMetadata
    sample_rows: Tensor
    first_rows: tuple[int, ...]


def build_input(scheduled: Sequence[ScheduledRequest], block_size: int, device: torch.device) -> ModelInput:
    """Pack the scheduled parts of all requests into the tensors of one step.

    On the token axis, requests with one new token come first, longest first: attention serves those of similar length
    together, and neighbours are cheaper to serve than scattered ones. `sample_rows` and `first_rows` keep the order of
    `scheduled`.
    """
    order = sorted(range(len(scheduled)), key=lambda i: -scheduled[i].end if scheduled[i].num_new_tokens == 1 else 0)
    packed = [scheduled[index] for index in order]
    query_lens = tuple(item.num_new_tokens for item in packed)
    ends = list(accumulate(query_lens))
    token_ids = np.concatenate([np.asarray(item.token_ids[item.start : item.end]) for item in packed])
    positions = np.concatenate([np.arange(item.start, item.end) for item in packed])
    tables = _block_tables(packed, block_size)
    requests = np.repeat(np.arange(len(packed)), query_lens)
    slots = tables[requests, positions // block_size] * block_size + positions % block_size
    end_of = dict(zip(order, ends, strict=True))
    sample_rows = [end_of[index] - 1 for index, item in enumerate(scheduled) if item.samples]
    seq_lens = tuple(item.end for item in packed)
    on_device = to_device(
        {
            "token_ids": token_ids.astype(np.int64, copy=False),
            "positions": positions.astype(np.int64, copy=False),
            "slot_mapping": slots,
            "block_tables": tables,
            "sample_rows": np.asarray(sample_rows, np.int64),
            "query_start_loc": np.asarray([0, *ends], np.int32),
            "seq_lens": np.asarray(seq_lens, np.int32),
        },
        device,
    )
    return ModelInput(
        token_ids=on_device["token_ids"],
        positions=on_device["positions"],
        metadata=AttnMetadata(
            slot_mapping=on_device["slot_mapping"],
            query_start_loc=on_device["query_start_loc"],
            seq_lens=on_device["seq_lens"],
            block_tables=on_device["block_tables"],
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
            block_size=block_size,
        ),
        sample_rows=on_device["sample_rows"],
        first_rows=tuple(end_of[index] - item.num_new_tokens for index, item in enumerate(scheduled)),
    )


def _block_tables(scheduled: Sequence[ScheduledRequest], block_size: int) -> np.ndarray:
    """int64 [num_reqs, max_blocks], padded with block 0, only as wide as this step reaches."""
    widths = [-(-item.end // block_size) for item in scheduled]
    tables = np.zeros((len(scheduled), max(widths)), dtype=np.int64)
    for row, item, width in zip(tables, scheduled, widths, strict=True):
        row[:width] = item.block_ids[:width]
    return tables
