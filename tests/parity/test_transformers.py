"""The same tokens as transformers, for every family and RoPE type, in fp32, with PyTorch's operators and our own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from miniserve import LLM, SamplingParams
from miniserve.core.schedule import ScheduledRequest, SchedulerOutput
from miniserve.runner.input_builder import build_input
from miniserve.runner.model_runner import ModelRunner
from tests.support import NUM_TOKEN_IDS, VOCAB_SIZE, random_prompt, reference_choices, tiny_model

ROPE_TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.2,
        "mscale_all_dim": 0.8,
    },
    "yarn-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.3,
        "truncate": False,
    },
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-head-dim": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {"head_dim": 16}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-bias-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 32}),
}


def _rope_variant(name: str) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": name, "rope_theta": 5000.0, **ROPE_TYPES[name]}}


CASES = [pytest.param(variant, id=name) for name, variant in VARIANTS.items()] + [
    pytest.param((family, _rope_variant(name)), id=f"{family}-{name}")
    for name in ROPE_TYPES
    for family in ("llama", "qwen3")
]


@dataclass(frozen=True)
class Model:
    """A checkpoint, and transformers' own model of it."""

    folder: Path
    reference: PreTrainedModel


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family, overrides = request.param
    folder = tmp_path_factory.mktemp(family)
    return Model(folder, tiny_model(folder, family, **overrides))


@pytest.mark.parametrize(("kernels", "block_size"), [("torch", 16), ("native", 32)], ids=["torch", "native"])
def test_tiny_model(model: Model, kernels: str, block_size: int) -> None:
    """Logits of a whole prompt within 1e-4, and 64 greedy tokens after prompts shorter and longer than a block."""
    reference = model.reference
    llm = LLM(str(model.folder), dtype="fp32", device="cpu", threads=1, kernels=kernels, block_size=block_size)
    assert (llm.parts.backend_name == "native") == (kernels == "native")
    for length in (5, block_size, 61):
        prompt = random_prompt(length)
        torch.testing.assert_close(_all_logits(llm, prompt), reference_logits(reference, prompt), atol=1e-4, rtol=1e-4)
        [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
        assert len(output.token_ids) == 64
        assert list(output.token_ids) == reference_choices(reference, output, NUM_TOKEN_IDS)


def test_the_random_models_read_their_whole_context(tmp_path: Path) -> None:
    """Guard for every test on a tiny model: changing the first token changes what comes 64 tokens later."""
    tiny_model(tmp_path, "llama")
    llm = LLM(str(tmp_path), dtype="fp32", device="cpu", threads=1)
    prompt = random_prompt(64)
    changed = [(prompt[0] + 1) % 256, *prompt[1:]]
    first, second = llm.generate([prompt, changed], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    assert first.token_ids != second.token_ids
    assert len(set(first.token_ids)) > 8


def _all_logits(llm: LLM, token_ids: list[int]) -> torch.Tensor:
    """fp32 [len(token_ids), vocab_size], straight from the model, in blocks that nobody holds."""
    runner = llm.parts.engine.runner
    assert isinstance(runner, ModelRunner)
    num_blocks = -(-len(token_ids) // runner.block_size)
    item = ScheduledRequest(
        "logits", token_ids, 0, len(token_ids), list(range(1, num_blocks + 1)), len(token_ids), SamplingParams(), True
    )
    step = SchedulerOutput((item,))
    inputs = build_input(step.scheduled, runner.block_size, runner.device)
    with torch.inference_mode():
        hidden = runner.model(inputs.token_ids, inputs.positions, runner.backend.plan(inputs.metadata), runner.caches)
        return runner.model.logits(hidden)


def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    assert logits.shape[-1] == VOCAB_SIZE
    return logits
