"""miniserve against transformers' own `generate`: the same model, dtype, prompts and machine, in one run.

    uv run python -m miniserve.benchmarks.versus_transformers --model smollm2

Both decode greedily, exactly --max-tokens tokens a prompt. transformers gets plain weights, SDPA attention and left
padding, which is its fastest way on a CPU; miniserve runs without its prefix cache, which would know the prompts from
the second repetition on. Unlike those of `bench`, the prompts are short, so that decoding is what is measured, and the
two processes stay: they take turns, and medians are compared, because a shared machine drifts.
"""

from __future__ import annotations

import argparse
import statistics

from rich.console import Console
from rich.table import Table

from miniserve import platform
from miniserve.benchmarks import hf_baseline, offline
from miniserve.benchmarks.arm import Worker
from miniserve.benchmarks.prompts import BRIEF_SYSTEM, Conversation, conversations
from miniserve.config import EngineConfig


def measure(miniserve: Worker, transformers: Worker, batch: list[Conversation], repeat: int) -> dict[str, list[float]]:
    """Output tokens per second of each arm, once per repetition, after one warm-up run each."""
    prompts = miniserve.run(batch).prompts
    transformers.run(prompts)
    speeds: dict[str, list[float]] = {"transformers": [], "miniserve": []}
    for _ in range(repeat):
        for name, worker in (("transformers", transformers), ("miniserve", miniserve)):
            run = worker.run(prompts)
            speeds[name].append(run.completion_tokens / run.seconds)
    return speeds


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
    config = EngineConfig(
        model=args.model, dtype=dtype, device="cpu", max_num_seqs=args.num_prompts, prefix_caching=False
    )
    batch = conversations(args.num_prompts, BRIEF_SYSTEM)
    table = Table("prompts", "arm", "out tok/s (median)", "min", "max", "ratio", title=f"{args.model}, {dtype}, cpu")
    with (
        Worker("miniserve", offline.load, config, args.max_tokens) as miniserve,
        Worker("transformers", hf_baseline.load, config, args.max_tokens) as transformers,
    ):
        for worker in (miniserve, transformers):
            worker.wait_until_loaded()
        for part in (batch, batch[1:2]):
            speeds = measure(miniserve, transformers, part, args.repeat)
            base = statistics.median(speeds["transformers"])
            for name, values in speeds.items():
                median = statistics.median(values)
                row = (f"{value:.1f}" for value in (median, min(values), max(values)))
                table.add_row(str(len(part)), name, *row, f"{median / base:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
