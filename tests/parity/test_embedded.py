"""The embedded SmolLM2 says what transformers says from the same file, in fp32."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from miniserve import LLM, SamplingParams
from miniserve.outputs import FinishReason
from tests.support import embedded_gguf, reference_choices

CHATS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "What is 12 times 12?",
    "Translate 'good morning' to Spanish.",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "List the planets of the solar system.",
    "Why is the sky blue?",
]
TEXTS = [
    "Once upon a time",
    "The three laws of robotics are",
    "def fibonacci(n):\n",
    "In 1969, the first",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "<html>\n<body>\n",
    "Q: What is the boiling point of water?\nA:",
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", dtype="fp32", device="cpu", max_model_len=512)


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    path = embedded_gguf()
    plain_weights = GgufConfig(dequantize=True)  # packed ones are unpacked again in every forward pass
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=plain_weights
    )
    return model


def test_greedy_tokens(llm: LLM, reference: PreTrainedModel) -> None:
    """20 prompts, 48 tokens each, as one batch."""
    sampling = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    requests = llm.chat_requests([[{"role": "user", "content": text}] for text in CHATS], sampling)
    requests += llm.prompt_requests(TEXTS, sampling)
    for output in llm.run(requests):
        assert len(output.token_ids) == 48
        assert list(output.token_ids) == reference_choices(reference, output, num_token_ids=49152)


def test_the_answer_that_the_readme_shows(llm: LLM) -> None:
    [output] = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(temperature=0, max_tokens=None),
    )
    assert output.text == "The capital of France is Paris."
    assert output.finish_reason is FinishReason.STOP
