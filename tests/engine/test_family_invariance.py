"""A greedy answer does not depend on how it was computed, for every family: windows, sinks, experts and all.

`test_invariance` and `test_native_invariance` go further for two of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miniserve import LLM, SamplingParams
from tests.support import FAMILIES, WINDOW, random_prompt, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 33, 50, 64, 90)
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 7},
    "chunked-no-cache": {"max_num_batched_tokens": 40, "prefix_caching": False},
    "preempted": {"num_kv_blocks": 7},
    "few-at-once": {"max_num_seqs": 3},
}
BACKENDS: dict[str, dict[str, Any]] = {
    "torch": {"kernels": "torch", "attention_backend": "torch"},
    "sdpa": {"kernels": "torch", "attention_backend": "sdpa"},
    "native": {"kernels": "native", "attention_backend": "native"},
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    tiny_model(path, request.param)
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]


def load(folder: Path, **options: Any) -> LLM:
    fixed: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "threads": 1, "max_model_len": 128, "block_size": 32}
    return LLM(str(folder), **{**fixed, **options})


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Each prompt alone, whole, with nothing cached, on the reference backend."""
    llm = load(folder, **BACKENDS["torch"], prefix_caching=False)
    answers = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
    assert len(set(answers)) == len(answers), "the prompts must have different answers"
    return answers


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_same_tokens(
    folder: Path,
    prompts: list[list[int]],
    expected: list[tuple[int, ...]],
    way: dict[str, Any],
    backend: dict[str, Any],
) -> None:
    """Eight mixed requests at once; sent twice, so that the second time prompts may be in the cache."""
    llm = load(folder, **way, **backend)
    for _ in range(2):
        assert [output.token_ids for output in llm.generate(prompts, GREEDY)] == expected
    scheduler = llm.parts.engine.scheduler
    assert (scheduler.num_preemptions > 0) == ("num_kv_blocks" in way)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.capacity


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_native_answers_are_bit_identical(folder: Path, prompts: list[list[int]], dtype: str) -> None:
    """Tokens and logprobs."""
    alone = load(folder, **BACKENDS["native"], dtype=dtype, prefix_caching=False)
    single = [alone.generate(prompt, GREEDY)[0] for prompt in prompts]
    for way in WAYS.values():
        outputs = load(folder, **BACKENDS["native"], dtype=dtype, **way).generate(prompts, GREEDY)
        for output, own in zip(outputs, single, strict=True):
            assert (output.token_ids, output.logprobs) == (own.token_ids, own.logprobs)
