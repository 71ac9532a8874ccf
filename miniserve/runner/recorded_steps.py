"""Steps as a recording: what the model computes is recorded once, without computing it, and replayed in each step.

What CUDA graphs are to a GPU, without the GPU: the model is Python, and a replay leaves the Python out. It is the same
computation, so nothing in the answers tells which of the two it was. One recording serves steps of any size up to its
own; a larger step makes a larger one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor

from miniserve.attention.batch import AttnMetadata
from miniserve.kernels.native import NativeKernels
from miniserve.kernels.recording import CannotRecordError, Recording, record
from miniserve.runner.input_builder import ModelInput

logger = logging.getLogger(__name__)

Forward = Callable[[ModelInput], Tensor]


@dataclass(frozen=True, slots=True)
class Size:
    """Of a step: its new tokens, its requests, and the blocks of the longest of these."""

    num_tokens: int
    num_requests: int
    num_blocks: int

    @classmethod
    def of(cls, inputs: ModelInput) -> Size:
        """That of a step."""
        num_requests, num_blocks = inputs.metadata.block_tables.shape
        return cls(len(inputs.token_ids), num_requests, num_blocks)

    def fits(self, room: Size) -> bool:
        """Whether there is room for such a step."""
        return all(own <= its for own, its in zip(astuple(self), astuple(room), strict=True))

    def grown(self, least: Size) -> Size:
        """Room for `least` too: powers of two, so that it seldom has to grow again."""
        return Size(
            *(max(own, 1 << (its - 1).bit_length()) for own, its in zip(astuple(self), astuple(least), strict=True))
        )


class RecordedSteps:
    """Computes `forward`, by replaying it where it can be recorded."""

    def __init__(self, forward: Forward, kernels: NativeKernels) -> None:
        self._forward, self._kernels = forward, kernels
        self._largest = Size(1024, 16, 64)  # what most steps stay within; memory is taken as it is written
        self._recorded: _RecordedStep | None = None
        self._can_record = True

    def __call__(self, inputs: ModelInput) -> Tensor:
        """What `forward` gives: fp32 [num_tokens, hidden_size], until the next call."""
        size = Size.of(inputs)
        if self._can_record and (self._recorded is None or not size.fits(self._largest)):
            self._record(size)
        if self._recorded is None:
            return self._forward(inputs)
        self._recorded.inputs.set(inputs, size)
        return self._recorded.recording.replay(size.num_tokens, size.num_requests)

    def _record(self, size: Size) -> None:
        self._largest = self._largest.grown(size)
        inputs = _Inputs(self._largest)
        self._recorded = None  # its memory is not needed any more
        try:
            recording = record(
                self._kernels,
                lambda: self._forward(inputs.model_input),
                num_tokens=self._largest.num_tokens,
                num_requests=self._largest.num_requests,
            )
        except CannotRecordError as error:
            logger.info("steps are computed without a recording, which is slower: %s", error)
            self._can_record = False
        else:
            self._recorded = _RecordedStep(inputs, recording)


class _Inputs:
    """Inputs that stay where they are, with room for steps up to a size."""

    def __init__(self, room: Size) -> None:
        self._token_ids = np.zeros(room.num_tokens, np.int64)
        self._query_start_loc = np.zeros(room.num_requests + 1, np.int32)
        self._seq_lens = np.zeros(room.num_requests, np.int32)
        self._block_tables = np.zeros((room.num_requests, room.num_blocks), np.int64)
        nothing = torch.empty(0, dtype=torch.int64)
        self.model_input = ModelInput(
            token_ids=torch.from_numpy(self._token_ids),
            positions=nothing,  # the operators know them from the lengths
            metadata=AttnMetadata(
                slot_mapping=nothing,
                query_start_loc=torch.from_numpy(self._query_start_loc),
                seq_lens=torch.from_numpy(self._seq_lens),
                block_tables=torch.from_numpy(self._block_tables),
                query_lens_host=(),
                seq_lens_host=(),
                block_size=0,
            ),
            sample_rows=nothing,
            first_rows=(),
        )

    def set(self, inputs: ModelInput, size: Size) -> None:
        """Take over those of a step."""
        metadata = inputs.metadata
        self._token_ids[: size.num_tokens] = inputs.token_ids.numpy()
        self._query_start_loc[: size.num_requests + 1] = metadata.query_start_loc.numpy()
        self._seq_lens[: size.num_requests] = metadata.seq_lens.numpy()
        self._block_tables[: size.num_requests, : size.num_blocks] = metadata.block_tables.numpy()


@dataclass(frozen=True, slots=True)
class _RecordedStep:
    inputs: _Inputs
    recording: Recording
