"""The heart of the promise: a greedy answer does not depend on how it was computed.

Alone or batched, whole or in chunks, with or without the prefix cache, after a preemption, on any block size and
backend: the same token ids. fp32, on a tiny random model whose next token depends on its whole context.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from miniserve import LLM, SamplingParams
from miniserve.core.request import Request
from miniserve.outputs import FinishReason
from tests.support import random_prompt, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
MIXED_LENGTHS = (3, 17, 50, 16, 1, 33, 64, 8)
Tokens = tuple[int, ...]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    tiny_model(path, request.param)
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [random_prompt(length, seed) for seed, length in enumerate(MIXED_LENGTHS)]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[Tokens]:
    """Each prompt alone, whole, with nothing cached, on the reference backend."""
    llm = load(folder, attention_backend="torch", prefix_caching=False)
    answers = [generate(llm, [prompt])[0] for prompt in prompts]
    assert len(set(answers)) == len(answers), "the prompts must have different answers"
    return answers


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "fp32", "device": "cpu", "threads": 1, "max_model_len": 128, **options})


def generate(llm: LLM, prompts: Sequence[list[int]], sampling: SamplingParams = GREEDY) -> list[Tokens]:
    return [output.token_ids for output in llm.generate(list(prompts), sampling)]


def assert_all_blocks_free(llm: LLM) -> None:
    pool = llm.parts.engine.scheduler.kv.pool
    assert pool.num_free == pool.capacity


@pytest.mark.parametrize("backend", ["torch", "sdpa"])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("budget", [1, 7, 16, 64, 1024])
def test_batch_and_budget(
    folder: Path,
    prompts: list[list[int]],
    expected: list[Tokens],
    backend: str,
    prefix_caching: bool,
    budget: int,
) -> None:
    """Eight mixed lengths in one batch, under each token budget; sent twice, so that the second may hit the cache."""
    llm = load(
        folder, attention_backend=backend, prefix_caching=prefix_caching, max_num_batched_tokens=budget, block_size=8
    )
    for _ in range(2):
        assert generate(llm, prompts) == expected
    assert (llm.parts.engine.scheduler.kv.num_prefix_hit_tokens > 0) == prefix_caching
    assert_all_blocks_free(llm)


@pytest.mark.parametrize("backend", ["torch", "sdpa"])
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_block_size(
    folder: Path, prompts: list[list[int]], expected: list[Tokens], backend: str, block_size: int
) -> None:
    llm = load(folder, attention_backend=backend, block_size=block_size, max_num_batched_tokens=40)
    for _ in range(2):
        assert generate(llm, prompts) == expected


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_alone_or_few_at_once(
    folder: Path, prompts: list[list[int]], expected: list[Tokens], max_num_seqs: int
) -> None:
    assert generate(load(folder, max_num_seqs=max_num_seqs), prompts) == expected


@pytest.mark.parametrize("backend", ["torch", "sdpa"])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("budget", [16, 1024])
def test_preemption(
    folder: Path,
    prompts: list[list[int]],
    expected: list[Tokens],
    backend: str,
    prefix_caching: bool,
    budget: int,
) -> None:
    """A pool with room for little more than the longest request: the others lose their blocks and start over."""
    llm = load(
        folder,
        attention_backend=backend,
        prefix_caching=prefix_caching,
        max_num_batched_tokens=budget,
        block_size=8,
        num_kv_blocks=14,
    )
    assert generate(llm, prompts) == expected
    assert llm.parts.engine.scheduler.num_preemptions > 0
    assert_all_blocks_free(llm)


@pytest.mark.parametrize("backend", ["torch", "sdpa"])
@pytest.mark.parametrize("budget", [5, 1024])
@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17, 23, 24, 25])
def test_lengths_around_whole_blocks(folder: Path, backend: str, budget: int, length: int) -> None:
    """k x block_size - 1, exactly, and + 1, sent twice: the second time all whole blocks but the last token hit."""
    prompt = random_prompt(length, seed=100 + length)
    [answer] = generate(load(folder, attention_backend="torch", prefix_caching=False), [prompt])
    llm = load(folder, attention_backend=backend, block_size=8, max_num_batched_tokens=budget)
    for expected_cached in (0, (length - 1) // 8 * 8):
        [output] = llm.generate([prompt], GREEDY)
        assert output.token_ids == answer
        assert output.usage.cached_tokens == expected_cached


@pytest.mark.parametrize("backend", ["torch", "sdpa"])
@pytest.mark.parametrize("budget", [10, 1024])
def test_two_equal_prompts_in_one_step(folder: Path, backend: str, budget: int) -> None:
    """Neither may read blocks that the other has not written yet."""
    prompt = random_prompt(40, seed=7)
    [answer] = generate(load(folder, attention_backend="torch", prefix_caching=False), [prompt])
    llm = load(folder, attention_backend=backend, block_size=8, max_num_batched_tokens=budget)
    assert generate(llm, [prompt, prompt, prompt]) == [answer] * 3


def test_a_conversation_that_grows(folder: Path) -> None:
    """Each turn's prompt is the last prompt and its answer: it hits what was computed as an answer, too."""
    cached, plain = load(folder, block_size=8), load(folder, prefix_caching=False)
    prompt = random_prompt(20, seed=3)
    num_computed = 0
    for turn in range(3):
        [output] = cached.generate([prompt], GREEDY)
        assert (output.token_ids,) == tuple(generate(plain, [prompt]))
        assert output.usage.cached_tokens == num_computed // 8 * 8
        num_computed = len(prompt) + len(output.token_ids) - 1  # the last token of an answer is never computed
        prompt = [*prompt, *output.token_ids, *random_prompt(5, seed=turn)]


@pytest.mark.parametrize("steps_before_abort", [0, 1, 2, 5, 12])
def test_abort_in_every_phase(
    folder: Path, prompts: list[list[int]], expected: list[Tokens], steps_before_abort: int
) -> None:
    """Queued, in the middle of its prompt, decoding: the others answer as if it had never been there."""
    llm = load(folder, block_size=8, max_num_batched_tokens=24, max_num_seqs=4, num_kv_blocks=30)
    engine = llm.parts.engine
    kept = llm.prompt_requests(prompts, GREEDY)
    doomed = llm.prompt_requests([random_prompt(60, seed=50 + i) for i in range(3)], GREEDY)
    order = [*doomed[:1], *kept[:4], *doomed[1:], *kept[4:]]
    for request in order:
        engine.add(request)
    for _ in range(steps_before_abort):
        engine.step()
    for request in doomed:
        aborted = engine.abort(request.request_id)
        assert aborted is not None and aborted.finish_reason is FinishReason.ABORT
    while engine.has_work:
        engine.step()
    assert [answer(request) for request in kept] == expected
    assert_all_blocks_free(llm)
    assert generate(llm, [prompts[2]]) == [expected[2]]


def answer(request: Request) -> Tokens:
    return tuple(request.token_ids[request.num_prompt_tokens :])


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 7}, {"num_kv_blocks": 14}, {"max_num_seqs": 3}])
def test_seeded_sampling_does_not_see_its_neighbours(
    folder: Path, prompts: list[list[int]], options: dict[str, Any]
) -> None:
    """A seeded random answer is as reproducible as a greedy one: alone, batched, chunked, preempted."""
    sampling = [
        SamplingParams(temperature=0.9, top_p=0.95, max_tokens=20, ignore_eos=True, seed=seed)
        for seed in range(len(prompts))
    ]
    alone = load(folder, prefix_caching=False)
    expected = [alone.generate([prompt], params)[0].token_ids for prompt, params in zip(prompts, sampling, strict=True)]
    llm = load(folder, block_size=8, **options)
    assert [output.token_ids for output in llm.generate(prompts, sampling)] == expected
