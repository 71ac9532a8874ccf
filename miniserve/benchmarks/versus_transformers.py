"""miniserve against transformers' own `generate`: the same model, dtype, prompts and machine, in one run.

    uv run python -m miniserve.benchmarks.versus_transformers --model smollm2

Both decode greedily, exactly --max-tokens tokens a prompt. transformers gets plain weights, SDPA attention and left
padding, which is its fastest way on a CPU; miniserve runs without its prefix cache, which would know the prompts from
the second repetition on. Each arm has a process of its own; they take turns, and medians are compared, because a
shared machine drifts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from miniserve import LLM, SamplingParams, platform
from miniserve.benchmarks.prompts import conversations
from miniserve.config import EngineConfig
from miniserve.engine.build import load_tokenizer
from miniserve.models.checkpoint import open_checkpoint
from miniserve.text.chat_template import ChatTemplate

Arm = Callable[[list[list[int]]], int]  # prompts -> number of generated tokens


def transformers_arm(model_name: str, dtype: str, max_tokens: int) -> Arm:
    """Static batching: pad all prompts to the longest, generate until the last one is done."""
    path = open_checkpoint(model_name).path
    generate: Any = _load_reference(path, getattr(torch, dtype)).generate

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


def miniserve_arm(model_name: str, dtype: str, max_tokens: int, max_num_seqs: int) -> Arm:
    """Continuous batching through the paged engine."""
    llm = LLM(model_name, dtype=dtype, device="cpu", max_num_seqs=max_num_seqs, prefix_caching=False)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)

    def run(prompts: list[list[int]]) -> int:
        return sum(output.usage.completion_tokens for output in llm.generate(prompts, sampling))

    return run


# Each arm lives in a process of its own: neither sees the other's memory settings or threads.


class Worker:
    """One arm in its own process, idle unless it is asked to run."""

    def __init__(self, arm: Callable[..., Arm], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, arm, arguments), daemon=True)
        self._process.start()

    def run(self, prompts: list[list[int]]) -> float:
        """Output tokens per second of one run over `prompts`."""
        self._pipe.send(prompts)
        speed: float = self._pipe.recv()
        return speed

    def stop(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Connection, arm: Callable[..., Arm], arguments: tuple[object, ...]) -> None:
    run = arm(*arguments)
    while (prompts := pipe.recv()) is not None:
        start = time.perf_counter()
        num_tokens = run(prompts)
        pipe.send(num_tokens / (time.perf_counter() - start))


def measure(workers: dict[str, Worker], prompts: list[list[int]], repeat: int) -> dict[str, list[float]]:
    """Tokens per second of each arm, once per repetition, after one warm-up run each."""
    for worker in workers.values():
        worker.run(prompts)
    rounds = [{name: worker.run(prompts) for name, worker in workers.items()} for _ in range(repeat)]
    return {name: [speeds[name] for speeds in rounds] for name in workers}


def main() -> None:
    """Print one table: a batch, then a single stream."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: as the engine chooses")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()

    dtype = args.dtype or platform.detect().native_dtype("cpu")
    tokenizer = load_tokenizer(EngineConfig(model=args.model), open_checkpoint(args.model))
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    texts = [template.render(messages) for messages in conversations(args.num_prompts)]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    workers = {
        "transformers": Worker(transformers_arm, args.model, dtype, args.max_tokens),
        "miniserve": Worker(miniserve_arm, args.model, dtype, args.max_tokens, args.num_prompts),
    }
    table = Table("prompts", "arm", "out tok/s (median)", "min", "max", "ratio", title=f"{args.model}, {dtype}, cpu")
    for batch in (prompts, prompts[1:2]):
        speeds = measure(workers, batch, args.repeat)
        base = statistics.median(speeds["transformers"])
        for name, values in speeds.items():
            median = statistics.median(values)
            row = (median, min(values), max(values))
            table.add_row(str(len(batch)), name, *(f"{value:.1f}" for value in row), f"{median / base:.2f}")
    for worker in workers.values():
        worker.stop()
    Console().print(table)


if __name__ == "__main__":
    main()
