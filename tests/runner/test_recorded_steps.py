"""Recorded steps: nothing in the answers tells them from computed ones, and what cannot be recorded is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miniserve import LLM, SamplingParams
from miniserve.runner.input_builder import ModelInput
from miniserve.runner.model_runner import ModelRunner
from miniserve.runner.recorded_steps import RecordedSteps, Size
from tests.support import FAMILIES, random_prompt, tiny_model

LENGTHS = (3, 40, 17, 1, 33)
SAMPLING = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)


def load(folder: Path, **options: Any) -> LLM:
    fixed = {"device": "cpu", "threads": 1, "max_model_len": 128, "kernels": "native"}
    return LLM(str(folder), **{**fixed, **options})


def runner_of(llm: LLM) -> ModelRunner:
    runner = llm.parts.engine.runner
    assert isinstance(runner, ModelRunner)
    return runner


def steps_of(llm: LLM) -> RecordedSteps:
    steps = runner_of(llm)._compute
    assert isinstance(steps, RecordedSteps)
    return steps


def answers(llm: LLM) -> list[tuple[Any, Any]]:
    """Of prompts that come and go at different times, so that there are steps of any number of requests."""
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    params = [SamplingParams(temperature=0, max_tokens=8 * i + 4, ignore_eos=True, logprobs=2) for i in range(5)]
    return [(output.token_ids, output.logprobs) for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "fp32"},
        {"dtype": "bf16"},
        {"dtype": "bf16", "quantization": "int8", "kv_cache_dtype": "int8"},
        {"dtype": "bf16", "quantization": "int4"},
    ],
    ids=["fp32", "bf16", "int8", "int4"],
)
def test_answers_are_the_same(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    tiny_model(tmp_path, family)
    llm = load(tmp_path, **options)
    recorded = answers(llm)
    has_experts = runner_of(llm).model.config.experts is not None  # PyTorch groups the tokens by expert
    assert (steps_of(llm)._recorded is None) == has_experts
    plain = load(tmp_path, **options)
    runner_of(plain).compute_plainly()
    assert recorded == answers(plain)


def test_recordings_grow(tmp_path: Path) -> None:
    """With the steps: more tokens, more requests, wider block tables."""
    tiny_model(tmp_path, "llama")
    expected = answers(load(tmp_path))
    llm = load(tmp_path)
    steps = steps_of(llm)
    steps._largest = Size(1, 1, 1)
    assert answers(llm) == expected
    assert steps._largest == Size(128, 8, 4)  # 94 tokens of 5 prompts; up to 76 tokens in blocks of 32


def test_what_cannot_be_recorded_is_computed(tmp_path: Path) -> None:
    """A model that computes something with PyTorch's operators."""
    tiny_model(tmp_path, "llama")
    expected = answers(load(tmp_path))
    llm = load(tmp_path)
    steps = steps_of(llm)
    forward = steps._forward

    def with_foreign(inputs: ModelInput) -> Tensor:
        return forward(inputs).mul(1.0)

    steps._forward, steps._recorded = with_foreign, None
    assert answers(llm) == expected
    assert steps._recorded is None


def test_other_attention_is_not_recorded(tmp_path: Path) -> None:
    """Its products are compiled, and between them PyTorch attends."""
    tiny_model(tmp_path, "llama")
    llm = load(tmp_path, attention_backend="sdpa", dtype="fp32")
    tokens = [output[0] for output in answers(llm)]
    assert steps_of(llm)._recorded is None
    assert tokens == [output[0] for output in answers(load(tmp_path, dtype="fp32"))]


def test_a_step_that_fails_while_it_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is then computed alone, as after any failure; and the steps after it are fine."""
    tiny_model(tmp_path, "llama")
    llm = load(tmp_path)
    expected = answers(llm)
    failing = load(tmp_path)
    steps = steps_of(failing)
    forward, failures = steps._forward, [1]

    def fail_once(inputs: ModelInput) -> Tensor:
        if failures:
            failures.pop()
            raise RuntimeError("no memory")
        return forward(inputs)

    steps._forward, steps._recorded = fail_once, None
    assert answers(failing) == expected
    assert not failures and torch.is_inference_mode_enabled() is False
