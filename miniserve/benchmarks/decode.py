"""What a decode step costs: ways of keeping weights and KV cache, in turns, in one process.

    uv run python -m miniserve.benchmarks.decode --streams 1 16 --context 200

The bytes of a step are those of the weights and of the cached keys and values that it has to read. Their share of what
the machine can read meanwhile tells how far from the limit it is. All arms are in memory at once.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from miniserve import LLM, SamplingParams
from miniserve.benchmarks.peers.probes import bandwidth
from miniserve.core.schedule import SchedulerOutput
from miniserve.runner.model_runner import ModelRunner

ARMS: Mapping[str, Mapping[str, Any]] = {
    "torch": {"kernels": "torch"},
    "bf16": {},
    "unrecorded": {"recorded": False},
    "int8": {"quantization": "int8"},
    "int8-fast": {"quantization": "int8-fast"},
    "int4": {"quantization": "int4"},
    "kv-int8": {"kv_cache_dtype": "int8"},
    "int8+kv-int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4+kv-int8": {"quantization": "int4", "kv_cache_dtype": "int8"},
}
NUM_TOKENS = 32  # of an answer: as many steps count in a round


@dataclass(frozen=True, slots=True)
class Round:
    """Medians of one run.

    Attributes:
        step_seconds: of a step in which every stream computes one token.
        prefill_seconds: until the first of them.
    """

    step_seconds: float
    prefill_seconds: float


def runner_of(llm: LLM) -> ModelRunner:
    """The part that computes."""
    runner = llm.parts.engine.runner
    assert isinstance(runner, ModelRunner)
    return runner


class Arm:
    """One way, loaded."""

    def __init__(self, model: str, options: Mapping[str, Any], *, streams: int, context: int) -> None:
        options = {"dtype": "bf16", **options}
        is_recorded = options.pop("recorded", True)
        self._llm = LLM(
            model,
            device="cpu",
            prefix_caching=False,
            max_num_seqs=streams,
            max_model_len=context + 2 * NUM_TOKENS,
            num_kv_blocks=streams * -(-(context + 2 * NUM_TOKENS) // 16) + 1,
            **options,
        )
        self._runner = runner_of(self._llm)
        if not is_recorded:
            self._runner.compute_plainly()
        self._generator = random.Random(0)

    def bytes_of_step(self, streams: int, context: int) -> int:
        """What has to be read for one token of each stream."""
        runner = self._runner
        per_block = sum(cache.key_values[0].nbytes for cache in runner.caches)
        return runner.model.bytes_of_step + streams * context * per_block // runner.block_size

    def run(self, streams: int, context: int) -> Round:
        """Answer `streams` prompts of `context` tokens, no two alike."""
        prompts = [
            [self._generator.randrange(self._runner.num_token_ids) for _ in range(context)] for _ in range(streams)
        ]
        starts: list[float] = []

        def execute(step: SchedulerOutput) -> Any:
            if len(step.scheduled) == streams and all(item.end - item.start == 1 for item in step.scheduled):
                starts.append(perf_counter())
            return type(self._runner).execute(self._runner, step)

        self._runner.execute = execute  # type: ignore[method-assign]
        begin = perf_counter()
        self._llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
        steps = [end - start for start, end in pairwise(starts)]
        return Round(median(steps), starts[0] - begin)


def measure(model: str, names: Sequence[str], *, streams: int, context: int, rounds: int) -> Table:
    """A table of the arms, compared with the first of them."""
    arms = {name: Arm(model, ARMS[name], streams=streams, context=context) for name in names}
    measured: dict[str, list[Round]] = {name: [] for name in names}
    speeds: list[float] = []
    for index in range(rounds + 1):
        for name, arm in arms.items():
            result = arm.run(streams, context)
            if index > 0:  # the first round warms up
                measured[name].append(result)
        speeds.append(bandwidth())
    table = Table("arm", "step ms", "tokens/s", "ratio", "prefill ms", "ratio", "MB a step", "GB/s", "of the limit")
    steps = {name: median(part.step_seconds for part in parts) for name, parts in measured.items()}
    prefills = {name: median(part.prefill_seconds for part in parts) for name, parts in measured.items()}
    for name, arm in arms.items():
        num_bytes = arm.bytes_of_step(streams, context + NUM_TOKENS // 2)
        speed = num_bytes / steps[name] / 1e9
        table.add_row(
            name,
            f"{steps[name] * 1000:.2f}",
            f"{streams / steps[name]:.0f}",
            f"{steps[names[0]] / steps[name]:.2f}",
            f"{prefills[name] * 1000:.0f}",
            f"{prefills[names[0]] / prefills[name]:.2f}",
            f"{num_bytes / 1e6:.0f}",
            f"{speed:.1f}",
            f"{speed / median(speeds):.0%}",
        )
    table.title = f"{streams} streams, context {context}; the machine reads {median(speeds):.1f} GB/s"
    return table


def load_parser(description: str | None) -> argparse.ArgumentParser:
    """What a benchmark of steps is asked: the model, and with what load."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--context", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=5)
    return parser


def main() -> None:
    """Print a table for each number of streams."""
    parser = load_parser(__doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["bf16", "int8", "int8-fast", "int4", "kv-int8"])
    asked = parser.parse_args()
    console = Console(width=120)
    for streams in asked.streams:
        console.print(measure(asked.model, asked.arms, streams=streams, context=asked.context, rounds=asked.rounds))


if __name__ == "__main__":
    main()
