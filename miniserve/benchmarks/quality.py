"""How far small weights and an int8 KV cache move the model's answers: the divergence from fp32, token by token.

    uv run python -m miniserve.benchmarks.quality

For each position of a few texts, the Kullback-Leibler divergence of the next token's distribution from that of fp32
with PyTorch's operators, and whether the most probable token is the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from miniserve import LLM, SamplingParams
from miniserve.benchmarks.decode import ARMS, runner_of
from miniserve.core.schedule import ScheduledRequest
from miniserve.runner.input_builder import build_input

TEXTS = (
    "Before there were computers there were people whose work was to compute. They sat in long rows, each with one "
    "part of a sum, and passed their results on to the next desk. Machines with wheels took over the simplest of it.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n"
    "print([fibonacci(i) for i in range(10)])\n",
    "In a village by the sea an old fisherman told the children of a whale that sang at night. None of them slept, and "
    "in the morning they all went down to the beach to see whether it had left anything.",
    "For bread you need flour, water, salt and yeast. Mix them, knead the dough for ten minutes, let it rise for an "
    "hour, and bake it until it is golden.",
)
_EXACT = {"dtype": "fp32", "kernels": "torch"}


def log_probs(model: str, options: Mapping[str, Any]) -> Tensor:
    """fp32 [positions of all texts, vocab_size]."""
    llm = LLM(model, device="cpu", **{"dtype": "bf16", "max_model_len": 512, "num_kv_blocks": 64, **options})
    runner, tokenizer = runner_of(llm), llm.parts.input_processor.tokenizer
    results = []
    for text in TEXTS:
        token_ids = tokenizer.encode(text, add_special_tokens=True)
        blocks = list(range(1, -(-len(token_ids) // runner.block_size) + 1))
        item = ScheduledRequest(
            request_id="text",
            token_ids=token_ids,
            start=0,
            end=len(token_ids),
            block_ids=blocks,
            num_prompt_tokens=len(token_ids),
            sampling=SamplingParams(),
            samples=True,
        )
        with torch.inference_mode():
            inputs = build_input([item], runner.block_size, runner.device)
            plan = runner.backend.plan(inputs.metadata)
            hidden = runner.model(inputs.token_ids, inputs.positions, plan, runner.caches)
            results.append(runner.model.logits(hidden).log_softmax(dim=-1))
    return torch.cat(results)


def compare(exact: Tensor, other: Tensor) -> tuple[float, float, float]:
    """Mean and largest divergence in nats, and the share of positions with the same most probable token."""
    divergence = (exact.exp() * (exact - other)).sum(dim=-1)
    same = (exact.argmax(dim=-1) == other.argmax(dim=-1)).float().mean()
    return float(divergence.mean()), float(divergence.max()), float(same)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    asked = parser.parse_args()
    exact = log_probs(asked.model, _EXACT)
    table = Table("arm", "mean divergence", "largest", "same token", title=f"{len(exact)} positions")
    for name in asked.arms:
        mean, largest, same = compare(exact, log_probs(asked.model, ARMS[name]))
        table.add_row(name, f"{mean:.5f}", f"{largest:.3f}", f"{same:.1%}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
