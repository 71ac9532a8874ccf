"""What the arms measure, in this process, on a tiny model: counts are exact, times only ordered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from miniserve.benchmarks import hf_baseline, offline
from miniserve.benchmarks.arm import Load, Measurement
from miniserve.benchmarks.prompts import conversations
from miniserve.config import EngineConfig
from miniserve.errors import ConfigError, RequestError
from tests.support import random_prompt, tiny_model

MAX_TOKENS = 3


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(folder, "qwen3", max_position_embeddings=4096)
    return EngineConfig(model=str(folder), dtype="float32", device="cpu", max_num_seqs=2, threads=1, num_kv_blocks=600)


def measure(load: Load, config: EngineConfig, prompts: Any, max_tokens: int = MAX_TOKENS) -> Measurement:
    """One run; its progress ends with all tokens."""
    reports = []
    run = load(lambda done, total: None, config, max_tokens)(prompts, lambda *report: reports.append(report))
    total = len(prompts) * max_tokens
    assert reports == sorted(reports) and reports[-1] == (total, total)
    return run


def test_only_the_prompts_share_their_beginning(config: EngineConfig) -> None:
    """A lone prompt finds nothing of the warm-up's; a second one finds the system prompt, if there is a cache."""
    two = conversations(2)
    alone = measure(offline.load, config, two[:1])
    cached = measure(offline.load, replace(config, max_num_seqs=1), two)
    uncached = measure(offline.load, replace(config, max_num_seqs=1, prefix_caching=False), two)
    assert alone.cached_tokens == uncached.cached_tokens == 0
    assert cached.cached_tokens > cached.prompt_tokens / 3
    assert cached.prompts == uncached.prompts and cached.prompts[:1] == alone.prompts


def test_our_counts_and_times(config: EngineConfig) -> None:
    prompts = [random_prompt(length) for length in (40, 5, 9)]
    run = measure(offline.load, config, prompts)
    assert run.prompts == tuple(map(tuple, prompts))
    assert (run.prompt_tokens, run.completion_tokens, run.padded_prompt_tokens) == (54, 9, None)
    assert len(run.first_tokens) == len(run.latencies) == 3
    assert min(run.first_tokens) < min(run.latencies) <= max(run.latencies) <= run.seconds


def test_the_baselines_batches_follow_each_other(config: EngineConfig) -> None:
    """Two requests at once: each batch is padded to its longest prompt, and the second one waits."""
    run = measure(hf_baseline.load, config, [random_prompt(length) for length in (40, 5, 9)])
    assert (run.prompt_tokens, run.completion_tokens, run.padded_prompt_tokens) == (54, 9, 40 + 40 + 9)
    first, second, third = run.latencies
    assert first == second < third <= run.seconds
    assert run.first_tokens == ()


def test_what_the_baseline_refuses(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="--load-format dummy"):
        hf_baseline.load(lambda done, total: None, replace(config, load_format="dummy"), 1)
    with pytest.raises(RequestError, match=r"40 tokens, and 20 more .* 50"):
        measure(hf_baseline.load, replace(config, max_model_len=50), [random_prompt(40)], 20)
