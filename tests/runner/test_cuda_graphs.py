"""Graphs, but for the device: buckets, padding, and which steps go where. Capturing is replaced by computing again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from miniserve import LLM, SamplingParams
from miniserve.runner.cuda_graphs import CudaGraphs, GraphedSteps, GraphRoom, Replay, bucket_sizes
from miniserve.runner.model_runner import ModelRunner
from tests.attention.test_flash_attn import StandIn
from tests.support import random_prompt, tiny_model


class FakeGraphs:
    """What a device would do: a replay computes again on the same memory, and answers with the same tensor."""

    def __init__(self, *, free: int = 10**9, bytes_per_request: int = 1) -> None:
        self.free, self.bytes_per_request = free, bytes_per_request
        self.num_replays = 0

    def memory_of(self, compute: Replay) -> int:
        return len(compute()) * self.bytes_per_request

    def free_memory(self) -> int:
        return self.free

    def capture(self, compute: Replay) -> Replay:
        result = compute()

        def replay() -> Tensor:
            self.num_replays += 1
            return result.copy_(compute())

        return replay


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (16, (1, 2, 4, 8, 16)),
        (20, (1, 2, 4, 8, 16, 20)),
        (256, (1, 2, 4, *range(8, 257, 8))),
    ],
)
def test_buckets(most: int, sizes: tuple[int, ...]) -> None:
    assert bucket_sizes(most) == sizes


def with_graphs(folder: Path, graphs: FakeGraphs, **options: Any) -> tuple[LLM, ModelRunner]:
    """An engine whose attention can be captured, and that replays its decode steps."""
    fixed: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "threads": 1, "max_model_len": 128, "kernels": "torch"}
    llm = LLM(str(folder), **{**fixed, "block_size": 16, **options})
    runner = llm.parts.engine.runner
    assert isinstance(runner, ModelRunner)
    backend = StandIn(torch.float32)
    config = runner.model.config
    for cache in runner.caches:
        shape = backend.cache_shape(len(cache.key_values), 16, config.num_kv_heads, config.head_dim)
        object.__setattr__(cache, "key_values", torch.zeros(shape))
    runner.backend = backend
    assert runner.cannot_capture() is None
    most = options.get("max_num_seqs", 16)
    runner.capture(graphs, GraphRoom(most, 8, 16), on_capture=lambda _done, _total: None)
    return llm, runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma3")
    tiny_model(path, "gemma3")
    return path


def generate(llm: LLM, num_requests: int) -> list[tuple[int, ...]]:
    """Requests of other lengths, which end one after the other: steps of every size up to that."""
    prompts = [random_prompt(3 + 7 * index, index) for index in range(num_requests)]
    sampling = [SamplingParams(temperature=0, max_tokens=5 + index, ignore_eos=True) for index in range(num_requests)]
    return [output.token_ids for output in llm.generate(prompts, sampling)]


@pytest.mark.parametrize("num_requests", [1, 2, 3, 4, 5, 7, 8, 9, 12])
def test_answers_are_those_without_graphs(folder: Path, num_requests: int) -> None:
    """Around the borders of buckets, and with more requests than the largest."""
    plain = LLM(str(folder), dtype="fp32", device="cpu", threads=1, max_model_len=128, kernels="torch", max_num_seqs=10)
    graphs = FakeGraphs()
    llm, _ = with_graphs(folder, graphs, max_num_seqs=10)
    assert generate(llm, num_requests) == generate(plain, num_requests)
    assert graphs.num_replays > 0


def test_answers_after_a_preemption(folder: Path) -> None:
    llm, _ = with_graphs(folder, FakeGraphs(), num_kv_blocks=9)
    plain = LLM(str(folder), dtype="fp32", device="cpu", threads=1, max_model_len=128, kernels="torch")
    assert generate(llm, 6) == generate(plain, 6)
    assert llm.parts.engine.scheduler.num_preemptions > 0


def steps_of(runner: ModelRunner) -> GraphedSteps:
    assert isinstance(runner._compute, GraphedSteps)
    return runner._compute


def test_only_decode_steps_are_replayed(folder: Path) -> None:
    graphs = FakeGraphs()
    llm, _ = with_graphs(folder, graphs)
    llm.generate(random_prompt(40), SamplingParams(temperature=0, max_tokens=1))
    assert graphs.num_replays == 0
    llm.generate(random_prompt(40), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert graphs.num_replays == 5


def test_nobody_reads_what_the_padding_writes(folder: Path) -> None:
    """It goes to block 0; every other block stays as it is but for the slots of the step's tokens."""
    llm, runner = with_graphs(folder, FakeGraphs())
    llm.generate([random_prompt(20, seed) for seed in range(3)], SamplingParams(temperature=0, max_tokens=4))
    before = [cache.key_values.clone() for cache in runner.caches]
    llm.generate([random_prompt(20, seed) for seed in range(3)], SamplingParams(temperature=0, max_tokens=4))
    for cache, old in zip(runner.caches, before, strict=True):
        changed = (cache.key_values != old).flatten(1).any(dim=1)
        assert int(changed.sum()) <= 3 * 2 + 1, "two blocks a request, and block 0"


def test_sizes_without_memory_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps that they would have served are computed, with the same answers."""
    graphs = FakeGraphs(free=5, bytes_per_request=1)
    with caplog.at_level(logging.WARNING):
        llm, runner = with_graphs(folder, graphs)
    assert steps_of(runner).sizes == [1, 2, 4]
    assert "no CUDA graph for 16 requests: it takes 16 bytes, and 5 are free" in caplog.text
    plain = LLM(str(folder), dtype="fp32", device="cpu", threads=1, max_model_len=128, kernels="torch")
    assert generate(llm, 9) == generate(plain, 9)


def test_the_largest_is_captured_first_and_progress_is_told(folder: Path) -> None:
    _, runner = with_graphs(folder, FakeGraphs())
    sizes: list[int] = []
    told: list[tuple[int, int]] = []
    graphs = FakeGraphs()
    real = graphs.capture

    def capture(compute: Replay) -> Replay:
        sizes.append(len(compute()))
        return real(compute)

    graphs.capture = capture  # type: ignore[method-assign]
    on_capture: Callable[[int, int], None] = lambda done, total: told.append((done, total))  # noqa: E731
    assert runner.capture(graphs, GraphRoom(8, 8, 16), on_capture=on_capture) == [1, 2, 4, 8]
    assert sizes == [8, 4, 2, 1] and told == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(("family", "reason"), [("llama", "flash_attn"), ("qwen3_moe", "experts")])
def test_what_cannot_be_captured(tmp_path: Path, family: str, reason: str) -> None:
    tiny_model(tmp_path, family)
    llm = LLM(str(tmp_path), dtype="fp32", device="cpu", threads=1, kernels="torch")
    runner = llm.parts.engine.runner
    assert isinstance(runner, ModelRunner)
    if family == "qwen3_moe":
        runner.backend = StandIn(torch.float32)
    obstacle = runner.cannot_capture()
    assert obstacle is not None and reason in obstacle


class FakeCuda:
    """Notes down on which stream, and in which pool, something is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = "main"
        self.num_streams = 0
        self.computed: list[str] = []
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(torch.cuda, "Stream", self.make_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=lambda _other: None))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: self.within(stream.name))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: self.note("replay")))
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    def make_stream(self) -> SimpleNamespace:
        self.num_streams += 1
        return SimpleNamespace(name=f"stream {self.num_streams}", wait_stream=lambda _other: None)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        before, self.now = self.now, name
        yield
        self.now = before

    def graph(self, _graph: Any, *, pool: str, stream: SimpleNamespace, capture_error_mode: str) -> Any:
        assert capture_error_mode == "thread_local"
        return self.within(f"capture on {stream.name} in {pool}")

    def note(self, what: str) -> None:
        self.computed.append(what)


def test_captures_share_a_stream_and_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a stream for each size kept the memory of that size's steps for itself."""
    cuda = FakeCuda(monkeypatch)
    results = [torch.zeros(1), torch.ones(1)]
    graphs = CudaGraphs()

    def capture(result: Tensor) -> Replay:
        def compute() -> Tensor:
            cuda.note(cuda.now)
            return result

        return graphs.capture(compute)

    replays = [capture(result) for result in results]
    once = ["stream 1", "stream 1", "capture on stream 1 in pool"]
    assert cuda.computed == once * 2
    assert [replay() for replay in replays] == results
    assert cuda.computed == [*once * 2, "replay", "replay"]
