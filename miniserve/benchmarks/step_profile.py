"""Where a decode step spends its time, and how near its two reading parts are to the memory's limit.

    uv run python -m miniserve.benchmarks.step_profile --streams 1 16

Timers stand around the parts of the engine's step; a part is the median over the steps of all rounds.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from miniserve import LLM, SamplingParams
from miniserve.benchmarks.decode import load_parser, runner_of
from miniserve.benchmarks.peers.probes import bandwidth
from miniserve.config import QUANTIZATIONS
from miniserve.runner import model_runner

NUM_TOKENS = 48  # of an answer: as many steps count in a round
_WHOLE = "whole step"
_LAYERS, _HEAD, _TEXT = "embedding and layers", "head", "tokens to text"


class Timers(ExitStack):
    """Seconds of each part, step by step; the timers are taken away at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def around(self, owner: Any, name: str, part: str) -> None:
        """Time each call of `owner.name`."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = call(*args, **kwargs)
            self.seconds[part].append(perf_counter() - start)
            return result

        self.enter_context(patch.object(owner, name, timed))

    def medians(self, num_last: int) -> dict[str, float]:
        """Of the last steps, which compute one token for each stream."""
        return {part: median(seconds[-num_last:]) for part, seconds in self.seconds.items()}


def profile(llm: LLM, *, streams: int, context: int, rounds: int) -> tuple[dict[str, float], float]:
    """Seconds by part, and the GB that the machine reads in a second meanwhile."""
    engine, runner = llm.parts.engine, runner_of(llm)
    generator = random.Random(0)
    parts: defaultdict[str, list[float]] = defaultdict(list)
    speeds: list[float] = []
    with Timers() as timers:
        timers.around(engine, "step", _WHOLE)
        timers.around(engine.scheduler, "schedule", "choose requests")
        timers.around(model_runner, "build_input", "build inputs")
        timers.around(runner, "_compute", _LAYERS)
        timers.around(runner.model, "logits", _HEAD)
        timers.around(runner.sampler, "sample", "choose tokens")
        timers.around(engine.scheduler, "update", "keep books")
        timers.around(engine.output_processor, "process", _TEXT)
        for index in range(rounds + 1):
            prompts = [[generator.randrange(runner.num_token_ids) for _ in range(context)] for _ in range(streams)]
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
            if index == 0:  # it warms up
                continue
            speeds.append(bandwidth())
            for part, seconds in timers.medians(NUM_TOKENS // 2).items():
                parts[part].append(seconds * (streams if part == _TEXT else 1))  # called for each request
    return {part: median(seconds) for part, seconds in parts.items()}, median(speeds)


def table(parts: Mapping[str, float], num_bytes: Mapping[str, int], speed: float) -> Table:
    """The parts of a step, and what is left of it."""
    shown = Table("part", "ms", "of the step", "MB read", "GB/s", "of the limit")
    whole = parts[_WHOLE]
    rest = whole - sum(seconds for part, seconds in parts.items() if part != _WHOLE)
    rows = {part: seconds for part, seconds in parts.items() if part != _WHOLE}
    read = {**num_bytes, _WHOLE: sum(num_bytes.values())}
    for part, seconds in {**rows, "everything else": rest, _WHOLE: whole}.items():
        rate = read.get(part, 0) / seconds / 1e9
        reading = [f"{read[part] / 1e6:.0f}", f"{rate:.1f}", f"{rate / speed:.0%}"] if part in read else []
        shown.add_row(part, f"{seconds * 1000:.2f}", f"{seconds / whole:.1%}", *reading)
    return shown


def main() -> None:
    """Print a table for each number of streams."""
    parser = load_parser(__doc__)
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none")
    asked = parser.parse_args()
    console = Console(width=120)
    for streams in asked.streams:
        llm = LLM(
            asked.model,
            device="cpu",
            dtype="bf16",
            quantization=asked.quantization,
            prefix_caching=False,
            max_num_seqs=streams,
            max_model_len=asked.context + 2 * NUM_TOKENS,
        )
        parts, speed = profile(llm, streams=streams, context=asked.context, rounds=asked.rounds)
        shown = table(parts, _bytes_of(llm, streams, asked.context + NUM_TOKENS // 2), speed)
        shown.title = f"{streams} streams, context {asked.context}; the machine reads {speed:.1f} GB/s"
        console.print(shown)


def _bytes_of(llm: LLM, streams: int, context: int) -> dict[str, int]:
    """What the layers and the head have to read for one token of each stream."""
    runner = runner_of(llm)
    model = runner.model
    head = (model.embed if model.head is None else model.head).num_bytes
    per_block = sum(cache.key_values[0].nbytes for cache in runner.caches)
    cached = streams * context * per_block // runner.block_size
    return {_LAYERS: model.bytes_of_step - head + cached, _HEAD: head}


if __name__ == "__main__":
    main()
