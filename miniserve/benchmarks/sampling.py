"""The cost of choosing tokens: native kernels against PyTorch's operators, in turns, in one process.

    uv run python -m miniserve.benchmarks.sampling

Logits are normal with a standard deviation of 4: spread as wide as those of a language model that is in doubt.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from miniserve import platform
from miniserve.kernels import sampling
from miniserve.kernels.load import best_instruction_set, load
from miniserve.kernels.sampling import SamplingOperators
from miniserve.runner.logits_processors import SampleRow
from miniserve.runner.logprobs import LogprobQuery, pack_logprobs
from miniserve.runner.sampler import Sampler
from miniserve.sampling_params import SamplingParams

VOCAB_SIZES = (49152, 151936)
NUM_ROWS = (1, 16)
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "top_k 50": SamplingParams(top_k=50),
}
Task = Callable[[], object]


def tasks_of(operators: SamplingOperators, logits: Tensor) -> dict[str, Task]:
    """What is measured, by name, done by `operators`."""
    sampler = Sampler(logits.device, 0, operators)
    tasks: dict[str, Task] = {}
    for name, params in KINDS.items():
        rows = [SampleRow(params, 0)] * len(logits)
        tasks[name] = lambda rows=rows: sampler.sample(logits, rows)  # type: ignore[misc]
    queries = [LogprobQuery(row, row, 5) for row in range(len(logits))]
    tasks["logprobs, 5 top"] = lambda: pack_logprobs(logits, queries, 5, operators)
    return tasks


def measure(arms: Mapping[str, Task], rounds: int) -> dict[str, float]:
    """Median milliseconds of each arm; they take turns, after one call that does not count."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(rounds + 1):
        for name, run in arms.items():
            start = perf_counter()
            run()
            if index > 0:
                times[name].append((perf_counter() - start) * 1000)
    return {name: median(of_arm) for name, of_arm in times.items()}


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="calls of each kind, of which the median counts")
    rounds: int = parser.parse_args().rounds
    console = Console()
    kernels = load(best_instruction_set(platform.detect().instruction_sets), progress=console.print)
    table = Table("rows x vocabulary", "kind", "native ms", "PyTorch ms", "ratio")
    for vocab_size in VOCAB_SIZES:
        for num_rows in NUM_ROWS:
            logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 4
            native, plain = tasks_of(kernels, logits), tasks_of(sampling, logits)
            for kind in native:
                times = measure({"native": native[kind], "plain": plain[kind]}, rounds)
                cells = (f"{times['native']:.3f}", f"{times['plain']:.3f}", f"{times['plain'] / times['native']:.1f}")
                table.add_row(f"{num_rows} x {vocab_size}", kind, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
