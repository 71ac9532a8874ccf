"""The heart of the promise: a greedy answer does not depend on how it was computed.

Alone or batched, whole or in chunks, with or without the prefix cache, after a preemption, on any block size and
backend: the same token ids, and the same logprobs, penalties and choices. fp32, on a tiny random model whose next token
depends on its whole context. With PyTorch's operators; `test_native_invariance` has the compiled kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any

import pytest

from miniserve import LLM, SamplingParams
from miniserve.core.request import Request
from miniserve.outputs import EngineOutput, FinishReason, RequestOutput, TokenLogprobs
from miniserve.runner.model_runner import ModelRunner
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
    fixed: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "threads": 1, "max_model_len": 128, "kernels": "torch"}
    return LLM(str(folder), **{**fixed, **options})


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


# --- logprobs, penalties, choices ---

WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "no-cache": {"prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 7},
    "preempted": {"num_kv_blocks": 14},
    "preempted-chunked-no-cache": {"num_kv_blocks": 14, "max_num_batched_tokens": 16, "prefix_caching": False},
    "few-at-once": {"max_num_seqs": 3},
}
every_way = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)


def assert_preempted_if_meant(llm: LLM, options: dict[str, Any]) -> None:
    assert (llm.parts.engine.scheduler.num_preemptions > 0) == ("num_kv_blocks" in options)


def alone(folder: Path, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> list[RequestOutput]:
    """Each prompt by itself, whole, with nothing cached, on the reference backend."""
    llm = load(folder, attention_backend="torch", prefix_caching=False)
    return [llm.generate([prompt], params)[0] for prompt, params in zip(prompts, sampling, strict=True)]


def assert_same_logprobs(
    one: Sequence[TokenLogprobs | None] | None, other: Sequence[TokenLogprobs | None] | None
) -> None:
    """Equal but for rounding, which may also swap two of the most probable tokens."""
    assert one is not None and other is not None
    for a, b in zip(one, other, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert a.token_id == b.token_id
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert [logprob for _, logprob in a.top] == pytest.approx([logprob for _, logprob in b.top], abs=1e-4)


ASKING = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3, prompt_logprobs=2)
ASKING_OF_OUTPUT = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
SCORED = [ASKING if index % 3 else ASKING_OF_OUTPUT for index in range(len(MIXED_LENGTHS))]


@pytest.fixture(scope="module")
def scored_alone(folder: Path, prompts: list[list[int]]) -> list[RequestOutput]:
    return alone(folder, prompts, SCORED)


@every_way
def test_logprobs_and_prompt_logprobs(
    folder: Path, prompts: list[list[int]], scored_alone: list[RequestOutput], options: dict[str, Any]
) -> None:
    """One entry a token, each token's own, once: also where the prompt is cached, cut, or computed again."""
    llm = load(folder, block_size=8, **options)
    for _ in range(2):  # the second time, every prompt is in the cache
        for output, single, params in zip(llm.generate(prompts, SCORED), scored_alone, SCORED, strict=True):
            assert output.token_ids == single.token_ids
            assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
            assert_same_logprobs(output.logprobs, single.logprobs)
            if params.prompt_logprobs is None:
                assert output.prompt_logprobs is None
                continue
            assert_same_logprobs(output.prompt_logprobs, single.prompt_logprobs)
            assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
            ids = [entry.token_id for entry in output.prompt_logprobs[1:] if entry is not None]
            assert ids == list(output.prompt_token_ids[1:])
    assert_preempted_if_meant(llm, options)
    assert_all_blocks_free(llm)


@every_way
def test_prompt_logprobs_continue_in_the_logprobs_of_the_output(folder: Path, options: dict[str, Any]) -> None:
    """Scoring prompt and answer together gives what generating the answer gave; max_tokens 0 generates nothing."""
    llm = load(folder, block_size=8, **options)
    prompts = [random_prompt(length, seed=60 + length) for length in (9, 16, 31)]
    asking = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=1)
    answers = llm.generate(prompts, asking)
    whole = [[*output.prompt_token_ids, *output.token_ids] for output in answers]
    scored = llm.generate(whole, SamplingParams(max_tokens=0, prompt_logprobs=1))
    for output, answer in zip(scored, answers, strict=True):
        assert (output.token_ids, output.text, output.finish_reason) == ((), "", FinishReason.LENGTH)
        assert output.prompt_logprobs is not None
        assert_same_logprobs(output.prompt_logprobs[-30:], answer.logprobs)


KINDS: list[dict[str, Any]] = [
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.5},
    {"repetition_penalty": 1.8},
    {"logit_bias": {65: 8.0, 66: 8.0, 67: -100.0}},
    {"stop_token_ids": tuple(range(128)), "min_tokens": 24},
    {"presence_penalty": -1.0, "repetition_penalty": 1.3, "temperature": 0.7, "seed": 5, "top_p": 0.9},
    {"frequency_penalty": 2.0, "presence_penalty": 1.0, "logprobs": 2},
    {},
]
PENALISED = [SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **kind}) for kind in KINDS]


@pytest.fixture(scope="module")
def penalised_alone(folder: Path, prompts: list[list[int]], expected: list[Tokens]) -> list[Tokens]:
    answers = [output.token_ids for output in alone(folder, prompts, PENALISED)]
    changed = [answer != plain for answer, plain in zip(answers, expected, strict=True)]
    assert changed == [bool(kind) for kind in KINDS], "each kind must make a difference here"
    return answers


@every_way
def test_penalties_biases_and_bans(
    folder: Path, prompts: list[list[int]], penalised_alone: list[Tokens], options: dict[str, Any]
) -> None:
    """After a preemption, the tokens generated so far passed for prompt, and were penalised no longer."""
    llm = load(folder, block_size=8, **options)
    for _ in range(2):
        assert [output.token_ids for output in llm.generate(prompts, PENALISED)] == penalised_alone
    assert_preempted_if_meant(llm, options)


NUM_CHOICES = 3
CHOOSING: dict[str, Any] = {"temperature": 0.9, "max_tokens": 20, "ignore_eos": True, "logprobs": 1}


def run_choices(llm: LLM, prompts: Sequence[list[int]], sampling: SamplingParams, n: int) -> list[list[EngineOutput]]:
    """The merged outputs of n choices of each prompt, all prompts at once."""
    engine, merged = llm.parts.engine, dict[str, EngineOutput]()
    groups = [llm.parts.input_processor.choices(request, n) for request in llm.prompt_requests(prompts, sampling)]
    for parent, *forks in groups:
        engine.add(parent, forks)
    while engine.has_work:
        for output in engine.step():
            first = merged.get(output.request_id)
            merged[output.request_id] = output if first is None else first.merge(output)
    return [[merged[choice.request_id] for choice in group] for group in groups]


@pytest.fixture(scope="module")
def choices_alone(folder: Path, prompts: list[list[int]]) -> list[list[RequestOutput]]:
    """By prompt, what each choice gives as a request of its own."""
    sampling = [SamplingParams(seed=40 + index, **CHOOSING) for index in range(NUM_CHOICES)]
    return [alone(folder, [prompt] * NUM_CHOICES, sampling) for prompt in prompts]


@every_way
def test_choices_are_what_each_would_be_alone(
    folder: Path, prompts: list[list[int]], choices_alone: list[list[RequestOutput]], options: dict[str, Any]
) -> None:
    """Forks read blocks that their parent computed, and diverge after them; never each other's."""
    llm = load(folder, block_size=8, **options)
    groups = run_choices(llm, prompts, SamplingParams(seed=40, **CHOOSING), NUM_CHOICES)
    for group, singles in zip(groups, choices_alone, strict=True):
        assert [output.token_ids for output in group] == [single.token_ids for single in singles]
        assert len({output.token_ids for output in group}) == NUM_CHOICES
        for output, single in zip(group, singles, strict=True):
            assert_same_logprobs(output.logprobs, single.logprobs)
    assert_preempted_if_meant(llm, options)
    assert_all_blocks_free(llm)


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cache", "no-cache"])
def test_choices_share_one_computation_of_the_prompt(folder: Path, prefix_caching: bool) -> None:
    llm = load(folder, block_size=8, prefix_caching=prefix_caching, max_num_batched_tokens=16)
    [group] = run_choices(llm, [random_prompt(60, seed=9)], SamplingParams(temperature=0, max_tokens=9), 4)
    assert [output.usage.cached_tokens for output in group] == [0, 56, 56, 56]
    assert len({output.token_ids for output in group}) == 1


@pytest.mark.parametrize(
    "options", [{"block_size": 8}, {"kernels": "native", "block_size": 32}], ids=["torch", "native"]
)
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_numbers_that_are_not_finite_end_one_request(
    folder: Path, prompts: list[list[int]], expected: list[Tokens], steps: int, options: dict[str, Any]
) -> None:
    """NaN in one request's KV: it ends with an error, the others do not notice, and nobody finds its blocks later."""
    llm = load(folder, max_num_batched_tokens=150, **options)
    engine = llm.parts.engine
    requests = llm.prompt_requests(prompts, GREEDY)
    for request in requests:
        engine.add(request)
    outputs = [output for _ in range(steps) for output in engine.step()]
    poisoned = requests[2]
    assert isinstance(engine.runner, ModelRunner)
    for cache in engine.runner.caches:
        cache.key_values[poisoned.block_ids[0]] = nan
    while engine.has_work:
        outputs += engine.step()
    last = {output.request_id: output for output in outputs}
    reasons = [last[request.request_id].finish_reason for request in requests]
    assert reasons == [FinishReason.ERROR if request is poisoned else FinishReason.LENGTH for request in requests]
    assert [answer(request) for request in requests if request is not poisoned] == expected[:2] + expected[3:]
    assert_all_blocks_free(llm)
    assert generate(llm, prompts) == expected
