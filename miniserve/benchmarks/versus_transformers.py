"""miniserve against transformers' own `generate`: the same model, dtype, prompts and machine, in one run.

    uv run python -m miniserve.benchmarks.versus_transformers --model smollm2

Both decode greedily, exactly --max-tokens tokens a prompt. transformers gets plain weights, SDPA attention and left
padding, which is its fastest way on a CPU; miniserve runs without its prefix cache, which would know the prompts from
the second repetition on. The arms alternate, and medians are compared, because a shared machine drifts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from miniserve import LLM, SamplingParams
from miniserve.benchmarks.prompts import conversations
from miniserve.models.checkpoint import open_checkpoint

Arm = Callable[[list[list[int]]], int]  # prompts -> number of generated tokens


def transformers_arm(model_name: str, dtype: torch.dtype, max_tokens: int) -> Arm:
    """Static batching: pad all prompts to the longest, generate until the last one is done."""
    path = open_checkpoint(model_name).path
    generate: Any = _load_reference(path, dtype).generate

    def run(prompts: list[list[int]]) -> int:
        width = max(map(len, prompts))
        token_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output: Tensor = generate(
            token_ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )
        return len(prompts) * (output.shape[1] - width)

    return run


def _load_reference(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    if path.suffix == ".gguf":
        options |= {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        path = path.parent
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, **options)  # in evaluation mode
    return model


def miniserve_arm(llm: LLM, max_tokens: int) -> Arm:
    """Continuous batching through the paged engine."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    def run(prompts: list[list[int]]) -> int:
        return sum(output.usage.completion_tokens for output in llm.generate(prompts, sampling))

    return run


def measure(arms: dict[str, Arm], prompts: list[list[int]], repeat: int) -> dict[str, list[float]]:
    """Tokens per second of each arm, once per repetition, after one warm-up run each."""
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for repetition in range(repeat + 1):
        for name, arm in arms.items():
            start = time.perf_counter()
            num_tokens = arm(prompts)
            if repetition > 0:
                speeds[name].append(num_tokens / (time.perf_counter() - start))
    return speeds


def main() -> None:
    """Print one table: a batch, then a single stream."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()

    llm = LLM(args.model, dtype=args.dtype, device="cpu", max_num_seqs=args.num_prompts, prefix_caching=False)
    dtype: torch.dtype = getattr(torch, llm.parts.resolved.dtype)
    arms = {
        "transformers": transformers_arm(args.model, dtype, args.max_tokens),
        "miniserve": miniserve_arm(llm, args.max_tokens),
    }
    prompts = [request.token_ids for request in llm.chat_requests(conversations(args.num_prompts))]
    table = Table("prompts", "arm", "out tok/s (median)", "min", "max", "ratio")
    for batch in (prompts, prompts[1:2]):
        speeds = measure(arms, batch, args.repeat)
        base = statistics.median(speeds["transformers"])
        for name, values in speeds.items():
            median = statistics.median(values)
            row = (median, min(values), max(values))
            table.add_row(str(len(batch)), name, *(f"{value:.1f}" for value in row), f"{median / base:.2f}")
    console = Console()
    for line in llm.parts.summary:
        console.print(line, highlight=False)
    console.print(table)


if __name__ == "__main__":
    main()
