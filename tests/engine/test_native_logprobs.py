"""Logprobs do not depend on who else asks for them. Needs a vocabulary so large that threads could share a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miniserve import LLM, SamplingParams
from miniserve.outputs import RequestOutput
from tests.support import random_prompt, tiny_model

VOCAB_SIZE = 50_000
ASKED = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=3)
DRAWN = SamplingParams(temperature=1.0, seed=7, max_tokens=60, ignore_eos=True, logprobs=3, top_p=0.9)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(folder, "llama", vocab_size=VOCAB_SIZE)
    know_every_id(folder / "tokenizer.json")
    return LLM(str(folder), device="cpu", dtype="bf16", kernels="native", threads=2, max_model_len=128)


def know_every_id(path: Path) -> None:
    """Names for the ids that the byte tokenizer does not know: the model's logits of others are dropped."""
    tokenizer = json.loads(path.read_text())
    known = tokenizer["model"]["vocab"]
    known.update({f"<{index}>": index for index in range(len(known) + 3, VOCAB_SIZE)})
    path.write_text(json.dumps(tokenizer))


def answer(output: RequestOutput) -> object:
    return output.token_ids, output.logprobs


@pytest.mark.parametrize("params", [ASKED, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("num_neighbours", [1, 3])
def test_neighbours_that_ask_for_logprobs(llm: LLM, params: SamplingParams, num_neighbours: int) -> None:
    """Bug: a neighbour that asked for logprobs, too, changed the last bit of one in some twenty of them."""
    prompt = random_prompt(64)
    [alone] = llm.generate([prompt], params)
    neighbours = [random_prompt(64, seed) for seed in range(1, num_neighbours + 1)]
    for others in (ASKED, SamplingParams(max_tokens=8, prompt_logprobs=2)):
        together = llm.generate([prompt, *neighbours], [params, *[others] * num_neighbours])
        assert answer(together[0]) == answer(alone)
