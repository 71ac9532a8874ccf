"""Steps in which each request computes one token: recorded when they come first, and replayed from then on.

What CUDA graphs are to a GPU, without the GPU: the model is Python, and a recording leaves the Python out. It is the
same computation, so nothing in the answers tells which of the two it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from miniserve.kernels.native import NativeKernels
from miniserve.kernels.recording import Arena, CannotRecordError, Recording, record
from miniserve.runner.input_builder import ModelInput

logger = logging.getLogger(__name__)

# With more tokens, Python has done its part before the operators have done theirs.
MAX_REQUESTS = 32
_LEAST_BLOCKS = 32

Forward = Callable[[ModelInput], Tensor]


class RecordedSteps:
    """Computes `forward`, by replaying it where it can.

    One recording serves all steps of as many requests, and of block tables up to the same power of two in width.
    """

    def __init__(self, forward: Forward, kernels: NativeKernels) -> None:
        self._forward, self._kernels = forward, kernels
        self._arena = Arena()
        self._steps: dict[tuple[int, int], _RecordedStep] = {}
        self._can_record = True

    def __call__(self, inputs: ModelInput) -> Tensor:
        """What `forward` gives: fp32 [num_tokens, hidden_size], until the next call."""
        num_requests = inputs.metadata.num_reqs
        if not self._can_record or num_requests > MAX_REQUESTS or len(inputs.token_ids) > num_requests:
            return self._forward(inputs)
        num_blocks = _LEAST_BLOCKS
        while num_blocks < inputs.metadata.block_tables.shape[1]:
            num_blocks *= 2
        step = self._steps.get((num_requests, num_blocks))
        if step is not None:
            step.inputs.set(inputs)
            return step.recording.replay()
        return self._record(inputs, num_blocks)

    def _record(self, inputs: ModelInput, num_blocks: int) -> Tensor:
        own = _Inputs.like(inputs, num_blocks)
        own.set(inputs)
        try:
            recording = record(self._kernels, self._arena, lambda: self._forward(own.model_input))
        except CannotRecordError as error:
            logger.debug("steps are not recorded: %s", error)
            self._can_record = False
            return self._forward(inputs)
        self._steps[inputs.metadata.num_reqs, num_blocks] = _RecordedStep(own, recording)
        return recording.result


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Inputs that stay where they are, and get new contents."""

    model_input: ModelInput

    @classmethod
    def like(cls, inputs: ModelInput, num_blocks: int) -> _Inputs:
        """For as many requests as `inputs` has, with block tables of `num_blocks`."""
        metadata = inputs.metadata
        tables = metadata.block_tables.new_zeros((metadata.num_reqs, num_blocks))
        own = replace(metadata, seq_lens=metadata.seq_lens.clone(), block_tables=tables)
        return cls(replace(inputs, token_ids=inputs.token_ids.clone(), metadata=own))

    def set(self, inputs: ModelInput) -> None:
        """Take over what differs between two steps of as many requests."""
        own, metadata = self.model_input, inputs.metadata
        own.token_ids.copy_(inputs.token_ids)
        own.metadata.seq_lens.copy_(metadata.seq_lens)
        own.metadata.block_tables[:, : metadata.block_tables.shape[1]].copy_(metadata.block_tables)


@dataclass(frozen=True, slots=True)
class _RecordedStep:
    inputs: _Inputs
    recording: Recording
