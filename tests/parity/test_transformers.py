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
from tests.support import (
    FAMILIES,
    NUM_TOKEN_IDS,
    WINDOW,
    random_prompt,
    reference_choices,
    reference_logits,
    tiny_model,
)

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
_ORIGINAL = {"original_max_position_embeddings": 128}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {}),
    "mistral-head-dim": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {"head_dim": 16}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-bias-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 32}),
    "qwen2-upper-layers-slide": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "head_dim": 16},
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-plain-shares": ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
    "qwen3_moe-sparse-step": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "gemma2": ("gemma2", {}),
    "gemma2-tied": ("gemma2", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3", {}),
    "gemma3-tied-linear": (
        "gemma3",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2000.0},
            },
        },
    ),
    "smollm3": ("smollm3", {}),
    "smollm3-slides": ("smollm3", {"use_sliding_window": True, "sliding_window": WINDOW}),
    "phi3": ("phi3", {}),
    "phi3-plain": ("phi3", {"sliding_window": None, "rope_parameters": None}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "olmo3-yarn": ("olmo3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **_ORIGINAL}}),
    "granite": ("granite", {}),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "gpt_oss": ("gpt_oss", {}),
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
    """Logits of a whole prompt within 1e-4, and 64 greedy tokens: prompts around the length of block and window."""
    reference = model.reference
    llm = LLM(str(model.folder), dtype="fp32", device="cpu", threads=1, kernels=kernels, block_size=block_size)
    assert (llm.parts.backend_name == "native") == (kernels == "native")
    for length in (5, WINDOW - 1, WINDOW, WINDOW + 1, block_size, 61):
        prompt = random_prompt(length)
        torch.testing.assert_close(_all_logits(llm, prompt), reference_logits(reference, prompt), atol=1e-4, rtol=1e-4)
        [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
        assert len(output.token_ids) == 64
        assert list(output.token_ids) == reference_choices(reference, output, NUM_TOKEN_IDS)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
}


@pytest.mark.parametrize(("max_model_len", "length"), [(128, 60), (512, 129), (512, 200)])
def test_longrope(tmp_path: Path, max_model_len: int, length: int) -> None:
    """Short factors where no sequence may exceed the original context; else long ones, as in transformers beyond it."""
    reference = tiny_model(tmp_path, "phi3", rope_parameters=dict(LONGROPE), original_max_position_embeddings=128)
    llm = LLM(str(tmp_path), dtype="fp32", device="cpu", threads=1, max_model_len=max_model_len)
    prompt = random_prompt(length)
    torch.testing.assert_close(_all_logits(llm, prompt), reference_logits(reference, prompt), atol=1e-4, rtol=1e-4)
    [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    assert list(output.token_ids) == reference_choices(reference, output, NUM_TOKEN_IDS)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_random_models_read_their_whole_context(tmp_path: Path, family: str) -> None:
    """Guard for every test on a tiny model: a changed token is seen 40 tokens later, through all windows."""
    tiny_model(tmp_path, family)
    llm = LLM(str(tmp_path), dtype="fp32", device="cpu", threads=1)
    prompt = random_prompt(64)
    changed = [*prompt[:24], (prompt[24] + 1) % 256, *prompt[25:]]
    first, second = _all_logits(llm, prompt)[-1], _all_logits(llm, changed)[-1]
    assert (first - second).abs().max() > 0.02
    [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    assert len(set(output.token_ids)) > 8


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
