"""With the compiled kernels, an answer is the same bit for bit, however it was computed; in bf16 as well as in fp32.

What `test_invariance` says of PyTorch's operators holds but for rounding, and only in fp32: a product of one row is
not summed as one of many. The kernels promise more, so that here tokens and logprobs are compared with ==.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from miniserve import LLM, SamplingParams
from miniserve.outputs import RequestOutput, TokenLogprobs
from tests.support import random_prompt, tiny_model

LENGTHS = (3, 17, 50, 70, 1, 64, 33, 8)
KINDS: list[dict[str, Any]] = [
    {"logprobs": 2, "prompt_logprobs": 2},
    {"temperature": 0.9, "top_p": 0.95, "seed": 5, "logprobs": 1},
    {"prompt_logprobs": 0, "logprobs": 0},
    {"frequency_penalty": 1.5, "repetition_penalty": 1.3, "logprobs": 2},
    {"logprobs": 2},
    {"temperature": 0.7, "top_k": 20, "seed": 6, "presence_penalty": 1.0, "logprobs": 1},
    {"logprobs": 1, "prompt_logprobs": 1},
    {"logprobs": 2, "logit_bias": {65: 8.0, 66: -100.0}},
]
SAMPLING = [SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **kind}) for kind in KINDS]
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "no-cache": {"prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 7},
    "larger-chunks-and-blocks": {"max_num_batched_tokens": 40, "block_size": 64},
    "preempted": {"num_kv_blocks": 6},
    "preempted-chunked-no-cache": {"num_kv_blocks": 6, "max_num_batched_tokens": 16, "prefix_caching": False},
    "few-at-once": {"max_num_seqs": 3},
    "two-threads": {"threads": 2, "max_num_batched_tokens": 100},
}
Model = tuple[Path, str, str, str]
Answer = tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...], tuple[TokenLogprobs | None, ...] | None]


@pytest.fixture(
    scope="module",
    params=[
        ("llama", "fp32", "none", "auto"),
        ("llama", "bf16", "int8", "auto"),
        ("llama", "bf16", "int4", "int8"),
        ("qwen3", "bf16", "none", "auto"),
        ("qwen3", "bf16", "int8-fast", "int8"),
    ],
    ids="-".join,
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A folder, a dtype, the weights' quantization, and the KV cache's dtype."""
    family, dtype, quantization, kv_cache_dtype = request.param
    folder = tmp_path_factory.mktemp(family)
    tiny_model(folder, family)
    return folder, dtype, quantization, kv_cache_dtype


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def alone(model: Model, prompts: list[list[int]]) -> list[RequestOutput]:
    """Each prompt by itself, whole, with nothing cached."""
    llm = load(model, prefix_caching=False)
    assert llm.parts.backend_name == "native"
    outputs = [llm.generate([prompt], params)[0] for prompt, params in zip(prompts, SAMPLING, strict=True)]
    assert len({output.token_ids for output in outputs}) == len(outputs), "the prompts must have different answers"
    return outputs


def load(model: Model, **options: Any) -> LLM:
    folder, dtype, quantization, kv_cache_dtype = model
    types = {"dtype": dtype, "quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    fixed: dict[str, Any] = {"device": "cpu", "threads": 1, "max_model_len": 128, "kernels": "native"}
    return LLM(str(folder), **{**types, **fixed, **options})


def answers(outputs: Sequence[RequestOutput]) -> list[Answer]:
    """All that may not differ."""
    return [(output.token_ids, output.logprobs or (), output.prompt_logprobs) for output in outputs]


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_tokens_and_logprobs_are_bit_identical(
    model: Model, prompts: list[list[int]], alone: list[RequestOutput], options: dict[str, Any]
) -> None:
    """Eight mixed requests at once; sent twice, so that the second time prompts may be in the cache."""
    llm = load(model, **options)
    for _ in range(2):
        for one, expected in zip(answers(llm.generate(prompts, SAMPLING)), answers(alone), strict=True):
            assert one == expected
    scheduler = llm.parts.engine.scheduler
    assert (scheduler.num_preemptions > 0) == ("num_kv_blocks" in options)
    if "num_kv_blocks" not in options:  # a small pool forgets
        assert (scheduler.kv.num_prefix_hit_tokens > 0) == options.get("prefix_caching", True)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.capacity


def test_the_same_tokens_as_pytorchs_operators(
    model: Model, prompts: list[list[int]], alone: list[RequestOutput]
) -> None:
    """In fp32, where rounding does not decide: greedy or random, with penalties or without."""
    if model[1] != "fp32":
        pytest.skip("the two round to bf16 at different places")
    llm = load(model, kernels="torch", attention_backend="torch")
    outputs = llm.generate(prompts, SAMPLING)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]


@pytest.mark.parametrize("length", [31, 32, 33, 64, 65])
def test_lengths_around_whole_blocks(model: Model, length: int) -> None:
    """The second time, all whole blocks but the last token hit; the answer is the one that computed them."""
    prompt = random_prompt(length, seed=100 + length)
    llm = load(model, max_num_batched_tokens=20)
    outputs = [llm.generate([prompt], SAMPLING[4])[0] for _ in range(2)]
    assert answers(outputs[:1]) == answers(outputs[1:])
    assert [output.usage.cached_tokens for output in outputs] == [0, (length - 1) // 32 * 32]
