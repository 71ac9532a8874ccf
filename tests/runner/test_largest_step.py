"""The step that memory is planned for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from miniserve import platform
from miniserve.config import EngineConfig, ResolvedConfig, resolve
from miniserve.errors import ConfigError
from miniserve.platform import Machine
from miniserve.runner.build import bytes_of_largest_step
from miniserve.runner.largest_step import largest_step
from miniserve.runner.model_runner import ModelRunner
from tests.runner.tiny import tiny_runner


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


def settled(**options: int) -> ResolvedConfig:
    asked = EngineConfig(model="m", device="cpu", block_size=4, **options)  # type: ignore[arg-type]
    return resolve(asked, Machine(("cpu",), 1, cpu_has_bf16=False), model_max_len=64)


def test_it_is_tried_out_in_a_pool_that_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the pool of the trial lived on until the garbage collector came by, beside the real one."""
    runner = tiny_runner()  # which its maker keeps, as a cycle of references would
    pools = [weakref.ref(cache.key_values) for cache in runner.caches]
    tried: list[object] = []
    asked_blocks: list[int] = []

    def memory_of(compute: Callable[[], object]) -> int:
        tried.append(compute())
        return 7

    def make_runner(num_blocks: int) -> ModelRunner:
        asked_blocks.append(num_blocks)
        return runner

    monkeypatch.setattr(platform, "memory_of", memory_of)
    assert bytes_of_largest_step(settled(max_num_seqs=3, max_num_batched_tokens=10), make_runner) == 7
    assert asked_blocks == [1 + 3] and len(tried) == 1
    assert [pool() for pool in pools] == [None] * len(pools)


def test_no_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory_of(_compute: Callable[[], object]) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(platform, "memory_of", memory_of)
    resolved = replace(settled(max_num_seqs=3), max_num_batched_tokens=10)
    with pytest.raises(ConfigError, match="10 tokens of 3 requests: lower --max-num-batched-tokens"):
        bytes_of_largest_step(resolved, lambda _blocks: tiny_runner())
