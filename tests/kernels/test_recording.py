"""Recordings: replays compute anew from what the inputs hold, and nothing that they would miss is ever recorded."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from miniserve.kernels.native import HeadTransform, NativeKernels, Norm, PackedMatrix, PagedStep, cache_shape, zeros
from miniserve.kernels.quantised import SCHEMES, QuantisedMatrix
from miniserve.kernels.recording import Arena, CannotRecordError, record

SIZE = 40
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


class Block:
    """An embedding and most of a layer, over a cache of two blocks; `inputs` are tokens of one request each."""

    def __init__(self, kernels: NativeKernels, scheme: str | None, num_requests: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def matrix(rows: int, columns: int, *, gate: bool = False) -> PackedMatrix | QuantisedMatrix:
            weight = torch.randn(rows, columns, generator=generator).bfloat16()
            if scheme is None:
                return PackedMatrix(kernels, weight, gate=gate)
            return QuantisedMatrix(kernels, SCHEMES[scheme].grid(weight), gate=gate)

        self.kernels = kernels
        self.embedding = matrix(30, SIZE)
        self.qkv = matrix((HEADS + 2 * KV_HEADS) * HEAD_DIM, SIZE)
        self.o = matrix(SIZE, HEADS * HEAD_DIM)
        self.gate_up, self.down = matrix(2 * 24, SIZE, gate=True), matrix(SIZE, 24)
        self.norm = Norm(torch.rand(SIZE, generator=generator), 1e-5)
        self.cache = zeros(cache_shape(2 * num_requests, 32, KV_HEADS, HEAD_DIM), torch.bfloat16)
        self.token_ids = torch.zeros(num_requests, dtype=torch.int64)
        self.step = PagedStep(
            torch.arange(num_requests + 1, dtype=torch.int32),
            torch.ones(num_requests, dtype=torch.int32),
            torch.arange(2 * num_requests).view(num_requests, 2),
        )

    def __call__(self) -> Tensor:
        residual = self.embedding.rows(self.token_ids)
        for _ in range(2):
            heads = self.qkv(residual, self.norm).view(len(residual), -1, HEAD_DIM)
            attended = self.kernels.attend(heads, KV_HEADS, HeadTransform(None), self.cache, self.step, scale=0.3)
            self.o.add_to_(residual, attended.flatten(1))
            self.down.add_to_(residual, self.gate_up.silu_gate(residual, self.norm))
        return residual

    def results(self, compute: Callable[[], Tensor]) -> list[Tensor]:
        """Of forty steps, each with tokens of its own, from an empty cache."""
        self.cache.zero_()
        results = []
        for position in range(40):
            self.token_ids.copy_((torch.arange(len(self.token_ids)) * 7 + position * 11) % 30)
            self.step.seq_lens.fill_(position + 1)
            results.append(compute().clone())
        return results


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
@pytest.mark.parametrize("num_requests", [1, 5])
def test_a_replay_is_the_computation(kernels: NativeKernels, scheme: str | None, num_requests: int) -> None:
    block = Block(kernels, scheme, num_requests)
    expected = block.results(block)
    assert not torch.equal(expected[0], expected[1])
    recording = record(kernels, Arena(), block)
    for actual, wanted in zip(block.results(recording.replay), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_recordings_share_memory(kernels: NativeKernels) -> None:
    """Other recordings write where this one does, and it is right all the same."""
    arena, sizes = Arena(), (1, 5, 3)
    blocks = [Block(kernels, None, num_requests) for num_requests in sizes]
    expected = [block.results(block) for block in blocks]
    recordings = [record(kernels, arena, block) for block in blocks]
    for block, recording, wanted in zip(blocks, recordings, expected, strict=True):
        for actual, one in zip(block.results(recording.replay), wanted, strict=True):
            assert torch.equal(actual, one)


def test_the_arena_gives_memory_again() -> None:
    arena = Arena()
    tensor = arena.empty((3, 5), torch.float32)
    assert tensor.shape == (3, 5) and tensor.dtype == torch.float32 and tensor.data_ptr() % 64 == 0
    address, view = tensor.data_ptr(), tensor.view(15)[3:]
    del tensor
    assert arena.empty((15,), torch.float32).data_ptr() != address, "a view is still there"
    del view
    again = arena.empty((15,), torch.float32)
    assert again.data_ptr() == address
    kept = [arena.empty((1000, 100), torch.bfloat16) for _ in range(20)]
    assert len({part.data_ptr() for part in kept}) == 20
    taken = arena.num_bytes
    del kept
    kept = [arena.empty((1000, 100), torch.bfloat16) for _ in range(20)]
    assert arena.num_bytes == taken
    for index, part in enumerate(kept):
        part.fill_(index)
    assert all(bool((part == index).all()) for index, part in enumerate(kept))


@pytest.mark.parametrize(
    ("compute", "named"),
    [
        (lambda x: x + 1, "aten::add"),
        (lambda x: x.add_(1), "aten::add_"),
        (lambda x: x.view(-1).clone(), "aten::clone"),
        (lambda x: torch.zeros(3), "aten::zero"),
    ],
)
def test_what_replays_would_miss_is_refused(
    kernels: NativeKernels, compute: Callable[[Tensor], Tensor], named: str
) -> None:
    matrix = PackedMatrix(kernels, torch.eye(32))
    x = torch.ones(2, 32)
    with pytest.raises(CannotRecordError, match=named):
        record(kernels, Arena(), lambda: compute(matrix(x)))
    assert torch.equal(record(kernels, Arena(), lambda: matrix(x)).replay(), x), "and others can be recorded"


def test_a_computation_that_fails_leaves_nothing_behind(kernels: NativeKernels) -> None:
    def fail() -> Tensor:
        raise MemoryError("none left")

    with pytest.raises(MemoryError, match="none left"):
        record(kernels, Arena(), fail)
    x, matrix = torch.ones(1, 32), PackedMatrix(kernels, torch.eye(32))
    assert torch.equal(record(kernels, Arena(), lambda: matrix(x)).replay(), x)


def test_inputs_are_checked_at_each_replay(kernels: NativeKernels) -> None:
    block = Block(kernels, None, 2)
    recording = record(kernels, Arena(), block)
    block.token_ids[1] = 30
    with pytest.raises(RuntimeError, match="ids: 30 is not below 30"):
        recording.replay()
    block.token_ids[1] = 0
    block.step.block_tables[1, 0] = 4
    with pytest.raises(RuntimeError, match="request 1: block 4 of 4"):
        recording.replay()
    block.step.block_tables[1, 0] = 2
    recording.replay()


def test_a_recording_ends_with_its_object(kernels: NativeKernels) -> None:
    x, matrix = torch.ones(1, 32), PackedMatrix(kernels, torch.eye(32))
    recording = record(kernels, Arena(), lambda: matrix(x))
    name = recording._name
    del recording
    gc.collect()
    with pytest.raises(IndexError, match=f"there is no recording {name}"):
        kernels.replay(name)


@pytest.mark.usefixtures("threads_restored")
def test_replays_use_the_threads_of_their_time(kernels: NativeKernels) -> None:
    torch.set_num_threads(2)
    block = Block(kernels, None, 5)
    recording = record(kernels, Arena(), block)
    expected = block.results(recording.replay)
    torch.set_num_threads(1)
    for actual, wanted in zip(block.results(recording.replay), expected, strict=True):
        assert torch.equal(actual, wanted)
