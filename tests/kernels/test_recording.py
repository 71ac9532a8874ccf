"""Recordings: replays compute from what their inputs hold, for any size, and nothing that they would miss is kept."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from miniserve.kernels.layout import cache_shape, zeros
from miniserve.kernels.native import HeadTransform, NativeKernels, Norm, PackedMatrix, PagedStep
from miniserve.kernels.quantised import SCHEMES, QuantisedMatrix
from miniserve.kernels.recording import Arena, CannotRecordError, Recording, record

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
        self.sinks = torch.randn(HEADS, generator=generator)
        self.cache = zeros(cache_shape(2 * num_requests, 32, KV_HEADS, HEAD_DIM), torch.bfloat16)
        self.token_ids = torch.zeros(num_requests, dtype=torch.int64)
        self.step = PagedStep(
            torch.arange(num_requests + 1, dtype=torch.int32),
            torch.ones(num_requests, dtype=torch.int32),
            torch.arange(2 * num_requests).view(num_requests, 2),
        )

    def __call__(self) -> Tensor:
        residual = self.embedding.rows(self.token_ids, 2.5)
        for _ in range(2):
            projected = self.qkv(residual, self.norm)
            self.kernels.normalise_(projected, 3, self.norm)
            heads = projected.view(len(residual), -1, HEAD_DIM)
            transform = HeadTransform(None)
            attended = self.kernels.attend(
                heads,
                KV_HEADS,
                transform,
                self.cache,
                self.step,
                scale=0.3,
                soft_cap=5.0,
                window=20,
                sinks=self.sinks,
            )
            self.o.add_to_(residual, attended.flatten(1))
            self.gate_up.feed_forward_(residual, self.norm, self.down, "clamped_swiglu")
            gated = self.gate_up.gate(residual, activation="gelu_tanh")
            self.kernels.add_(residual, self.down(gated), self.norm, 0.5)
        return residual

    def results(self, compute: Callable[[], Tensor], *, steps: int = 40) -> list[Tensor]:
        """Of some steps, each with tokens of its own, from an empty cache."""
        self.cache.zero_()
        results = []
        for position in range(steps):
            self.token_ids.copy_((torch.arange(len(self.token_ids)) * 7 + position * 11) % 30)
            self.step.seq_lens.fill_(position + 1)
            results.append(compute().clone())
        return results

    def recorded(self) -> Recording:
        size = len(self.token_ids)
        return record(self.kernels, self, num_tokens=size, num_requests=size)


def replaying(recording: Recording, size: int) -> Callable[[], Tensor]:
    return lambda: recording.replay(size, size)


@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
@pytest.mark.parametrize("num_requests", [1, 5])
def test_a_replay_is_the_computation(kernels: NativeKernels, scheme: str | None, num_requests: int) -> None:
    block = Block(kernels, scheme, num_requests)
    expected = block.results(block)
    assert not torch.equal(expected[0], expected[1])
    block.cache.fill_(7.0)
    recording = block.recorded()
    assert bool((block.cache == 7.0).all()), "recording computes nothing"
    for actual, wanted in zip(block.results(replaying(recording, num_requests)), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_smaller_steps(kernels: NativeKernels) -> None:
    """Of a recording for many tokens, the first ones."""
    block = Block(kernels, None, 40)
    expected = block.results(block)
    recording = block.recorded()
    for size in (1, 2, 17, 33, 39):
        for actual, wanted in zip(block.results(replaying(recording, size)), expected, strict=True):
            assert torch.equal(actual, wanted[:size])


def test_several_tokens_a_request(kernels: NativeKernels) -> None:
    """As many tokens as were recorded, but all of the first request."""
    block = Block(kernels, None, 20)
    block.token_ids.copy_(torch.arange(20))
    block.step.query_start_loc[1] = 20
    block.step.seq_lens[0] = 20
    one = PagedStep(block.step.query_start_loc[:2], block.step.seq_lens[:1], block.step.block_tables[:1])
    whole, block.step = block.step, one
    expected = block()
    block.step = whole
    recording = block.recorded()
    block.cache.zero_()
    assert torch.equal(recording.replay(20, 1), expected)


def test_sizes_that_have_no_room(kernels: NativeKernels) -> None:
    recording = Block(kernels, None, 5).recorded()
    for num_tokens, num_requests in ((6, 5), (5, 6), (0, 0), (1, 0), (-1, 1)):
        with pytest.raises(IndexError, match=f"no room for {num_tokens} and {num_requests}"):
            recording.replay(num_tokens, num_requests)


def test_a_call_of_another_size_is_refused(kernels: NativeKernels) -> None:
    """Its rows are no tokens, and a replay would not know how many there are."""
    matrix, x = PackedMatrix(kernels, torch.eye(32)), torch.ones(2, 32)
    with pytest.raises(CannotRecordError, match="of 3 tokens cannot keep a call with 2"):
        record(kernels, lambda: matrix(x), num_tokens=3, num_requests=1)


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
        (lambda x: x.t().flatten(), "aten::clone"),
    ],
)
def test_what_replays_would_miss_is_refused(
    kernels: NativeKernels, compute: Callable[[Tensor], Tensor], named: str
) -> None:
    matrix = PackedMatrix(kernels, torch.eye(32))
    x = torch.ones(2, 32)
    with pytest.raises(CannotRecordError, match=named):
        record(kernels, lambda: compute(matrix(x)), num_tokens=2, num_requests=1)
    recording = record(kernels, lambda: matrix(x), num_tokens=2, num_requests=1)
    assert torch.equal(recording.replay(2, 1), x), "and others can be recorded"


def test_a_computation_that_fails_leaves_nothing_behind(kernels: NativeKernels) -> None:
    def fail() -> Tensor:
        raise MemoryError("none left")

    with pytest.raises(MemoryError, match="none left"):
        record(kernels, fail, num_tokens=1, num_requests=1)
    x, matrix = torch.ones(1, 32), PackedMatrix(kernels, torch.eye(32))
    assert torch.equal(record(kernels, lambda: matrix(x), num_tokens=1, num_requests=1).replay(1, 1), x)


@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_inputs_are_checked_at_each_replay(kernels: NativeKernels, threads: int) -> None:
    """Whoever waits for the thread that finds the fault is told that it is over."""
    torch.set_num_threads(threads)
    block = Block(kernels, None, 2)
    recording = block.recorded()
    block.token_ids[1] = 30
    with pytest.raises(RuntimeError, match="ids: 30 is not below 30"):
        recording.replay(2, 2)
    block.token_ids[1] = 0
    block.step.block_tables[1, 0] = 4
    with pytest.raises(RuntimeError, match="request 1: block 4 of 4"):
        recording.replay(2, 2)
    block.step.block_tables[1, 0] = 2
    recording.replay(2, 2)


def test_a_recording_ends_with_its_object(kernels: NativeKernels) -> None:
    x, matrix = torch.ones(1, 32), PackedMatrix(kernels, torch.eye(32))
    recording = record(kernels, lambda: matrix(x), num_tokens=1, num_requests=1)
    name = recording._name
    del recording
    gc.collect()
    with pytest.raises(IndexError, match=f"there is no recording {name}"):
        kernels.replay(name, 1, 1)


def test_a_recording_ends_while_another_is_made(kernels: NativeKernels) -> None:
    """The garbage collector chooses when."""
    x, matrix = torch.ones(1, 32), PackedMatrix(kernels, torch.eye(32))
    others = [record(kernels, lambda: matrix(x), num_tokens=1, num_requests=1)]

    def compute() -> torch.Tensor:
        others.clear()
        return matrix(x)

    assert torch.equal(record(kernels, compute, num_tokens=1, num_requests=1).replay(1, 1), x)


@pytest.mark.usefixtures("threads_restored")
def test_replays_use_the_threads_of_their_time(kernels: NativeKernels) -> None:
    torch.set_num_threads(2)
    block = Block(kernels, None, 5)
    recording = block.recorded()
    expected = block.results(replaying(recording, 5), steps=5)
    for threads in (1, 3, 8):  # also more than there are cores: then each step takes long, as threads spin
        torch.set_num_threads(threads)
        for actual, wanted in zip(block.results(replaying(recording, 5), steps=5), expected, strict=True):
            assert torch.equal(actual, wanted)
