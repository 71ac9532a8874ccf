"""CUDA graphs: a decode step as one launch, instead of one for each of its hundreds of kernels.

A graph does the same work on the same memory each time. It is captured for steps of some sizes, the buckets; a step in
which every request computes one token goes into the smallest that holds it, and what is left over is filled up with
tokens that write to block 0, which nobody reads. Any other step is computed as if there were no graphs, and nothing in
the answers tells which of the two it was.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from miniserve import platform
from miniserve.attention.batch import AttnMetadata
from miniserve.runner.input_builder import ModelInput

logger = logging.getLogger(__name__)

Forward = Callable[[ModelInput], Tensor]
Replay = Callable[[], Tensor]


class Graphs(Protocol):
    """What captures; on CUDA `CudaGraphs`."""

    def memory_of(self, compute: Replay) -> int:
        """Bytes that the computation needs for itself."""

    def free_memory(self) -> int:
        """Bytes that are there."""

    def capture(self, compute: Replay) -> Replay:
        """What does the computation again, on the same memory, and returns the same tensor."""


def bucket_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, then every eighth size up to `most`, and that one."""
    return tuple(sorted({size for size in (1, 2, 4, *range(8, most, 8), most) if size <= most}))


@dataclass(frozen=True, slots=True)
class GraphRoom:
    """What graphs are made for.

    Attributes:
        most_requests, most_blocks: of a step, and of each of its requests.
        block_size: tokens per KV block.
    """

    most_requests: int
    most_blocks: int
    block_size: int


class GraphedSteps:
    """Computes `forward`, by replaying a graph where there is one."""

    def __init__(
        self,
        forward: Forward,
        graphs: Graphs,
        room: GraphRoom,
        *,
        device: torch.device,
        on_capture: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        self._forward = forward
        self._buffers = _Buffers(room, device)
        self._replays: dict[int, Replay] = {}
        sizes = bucket_sizes(room.most_requests)
        # The largest first: the others find room in the memory that it leaves.
        for done, size in enumerate(reversed(sizes), start=1):
            self._capture(size, graphs)
            on_capture(done, len(sizes))
        self._sizes = sorted(self._replays)

    @property
    def sizes(self) -> Sequence[int]:
        """Those that were captured."""
        return self._sizes

    def __call__(self, inputs: ModelInput) -> Tensor:
        """What `forward` gives: fp32 [num_tokens, hidden_size], until the next call."""
        size = self._bucket(inputs)
        if size is None:
            return self._forward(inputs)
        self._buffers.set(inputs, size)
        return self._replays[size]()[: len(inputs.token_ids)]

    def _bucket(self, inputs: ModelInput) -> int | None:
        """The size that holds the step; None where it is no decode step, or too large."""
        metadata = inputs.metadata
        if metadata.max_query_len != 1 or metadata.block_tables.shape[1] > self._buffers.most_blocks:
            return None
        index = bisect_left(self._sizes, metadata.num_reqs)
        return self._sizes[index] if index < len(self._sizes) else None

    def _capture(self, size: int, graphs: Graphs) -> None:
        inputs = self._buffers.inputs(size)

        def compute() -> Tensor:
            return self._forward(inputs)

        needed, free = graphs.memory_of(compute), graphs.free_memory()
        if needed > free:
            logger.warning("no CUDA graph for %d requests: it takes %d bytes, and %d are free", size, needed, free)
            return
        self._replays[size] = graphs.capture(compute)


class _Buffers:
    """Inputs that stay where they are."""

    def __init__(self, room: GraphRoom, device: torch.device) -> None:
        most, self.most_blocks, self._block_size = room.most_requests, room.most_blocks, room.block_size
        self._token_ids, self._positions, self._slots = torch.zeros(3, most, dtype=torch.int64, device=device)
        self._seq_lens = torch.ones(most, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(most, self.most_blocks, dtype=torch.int64, device=device)
        self._query_start_loc = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._sample_rows = torch.arange(most, device=device)

    def inputs(self, size: int) -> ModelInput:
        """Those of a step of `size` requests that may be as long as there is room for: views."""
        return ModelInput(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            metadata=AttnMetadata(
                slot_mapping=self._slots[:size],
                query_start_loc=self._query_start_loc[: size + 1],
                seq_lens=self._seq_lens[:size],
                block_tables=self._block_tables[:size],
                query_lens_host=(1,) * size,
                seq_lens_host=(self.most_blocks * self._block_size,) * size,
                block_size=self._block_size,
            ),
            sample_rows=self._sample_rows[:size],
            first_rows=tuple(range(size)),
        )

    def set(self, inputs: ModelInput, size: int) -> None:
        """Take over those of a step, and fill the bucket up with tokens of nobody."""
        metadata, used = inputs.metadata, len(inputs.token_ids)
        width = metadata.block_tables.shape[1]
        for buffer, values, nobody in (
            (self._token_ids, inputs.token_ids, 0),
            (self._positions, inputs.positions, 0),
            (self._slots, metadata.slot_mapping, 0),
            (self._seq_lens, metadata.seq_lens, 1),
        ):
            buffer[:used].copy_(values)
            buffer[used:size].fill_(nobody)
        self._block_tables[:used, :width].copy_(metadata.block_tables)
        self._block_tables[used:size].zero_()


class CudaGraphs:
    """`Graphs` of torch. They share one pool of memory, since only one of them runs at a time.

    And one stream: torch keeps freed memory for the stream that it was allocated on.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def memory_of(self, compute: Replay) -> int:
        """See `Graphs`."""
        return platform.memory_of(compute)

    def free_memory(self) -> int:
        """See `Graphs`."""
        return platform.free_memory("cuda")

    def capture(self, compute: Replay) -> Replay:
        """See `Graphs`. A few steps go before, on the stream of the capture, as torch asks for."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile is none of the capture's business.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
