"""How the cost of a decode step grows: with the context, with the number of streams, with the size of the model.

    uv run python -m miniserve.benchmarks.growth --plot growth.png

Beside each step stands what it would take if it did nothing but read its weights and cached keys and values, as fast as
the machine reads. The models of other sizes have the shapes of the SmolLM2 family, and random weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from miniserve.benchmarks.decode import NUM_TOKENS, Arm
from miniserve.benchmarks.peers.probes import bandwidth
from miniserve.benchmarks.report import check_can_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONTEXT, MANY = 128, 16  # where the other quantity grows
CONTEXTS = (128, 256, 512, 1024, 2048)
STREAMS = (1, 2, 4, 8, 16, 32)
_LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES: Mapping[str, Sequence[int]] = {
    "135M": (576, 1536, 30, 9, 3),
    "360M": (960, 2560, 32, 15, 5),
    "1.7B": (2048, 8192, 24, 32, 32),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One load, and medians over the rounds.

    Attributes:
        x: what grows, along its axis.
        step_ms: of a step in which every stream computes one token.
        limit_ms: of reading what such a step reads.
    """

    x: float
    step_ms: float
    limit_ms: float


Curves = Mapping[str, Sequence[Point]]


def curve(arm: Arm, loads: Sequence[tuple[float, int, int]], rounds: int) -> list[Point]:
    """Points of one model; `loads` are x, streams, and context. The loads take turns."""
    steps: list[list[float]] = [[] for _ in loads]
    speeds: list[float] = []
    for index in range(rounds + 1):
        for place, (_, streams, context) in enumerate(loads):
            seconds = arm.run(streams, context).step_seconds
            if index > 0:  # the first round warms up
                steps[place].append(seconds)
        speeds.append(bandwidth() * 1e9)
    return [
        Point(x, median(seconds) * 1000, arm.bytes_of_step(streams, context + NUM_TOKENS // 2) / median(speeds) * 1000)
        for (x, streams, context), seconds in zip(loads, steps, strict=True)
    ]


def over_context(arm: Arm, contexts: Sequence[int], rounds: int) -> Curves:
    """A step of one stream and of many."""
    return {
        f"{streams} stream{'s' * (streams > 1)}": curve(arm, [(size, streams, size) for size in contexts], rounds)
        for streams in (1, MANY)
    }


def over_streams(arm: Arm, streams: Sequence[int], rounds: int) -> Curves:
    """A step behind a short prompt."""
    return {f"context {CONTEXT}": curve(arm, [(number, number, CONTEXT) for number in streams], rounds)}


def over_size(shapes: Mapping[str, Sequence[int]], tokenizer: str, rounds: int) -> Curves:
    """A step of one stream and of many, by the megabytes of weights that it reads."""
    points: dict[str, list[Point]] = {"1 stream": [], f"{MANY} streams": []}
    for sizes in shapes.values():
        with dummy_model(sizes) as folder:
            arm = Arm(folder, {"load_format": "dummy", "tokenizer": tokenizer}, streams=MANY, context=CONTEXT)
        megabytes = arm.bytes_of_step(0, 0) / 1e6
        measured = curve(arm, [(megabytes, 1, CONTEXT), (megabytes, MANY, CONTEXT)], rounds)
        for found, point in zip(points.values(), measured, strict=True):
            found.append(point)
    return points


@contextmanager
def dummy_model(sizes: Sequence[int]) -> Iterator[str]:
    """A folder with the config of such a model, and no weights."""
    config = {**_LLAMA, **dict(zip(_SIZES, sizes, strict=True))}
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield folder


# What is shown


def table(quantity: str, curves: Curves) -> Table:
    """A row for each point."""
    shown = Table("load", quantity, "step ms", "limit ms", "limit / step", title=f"a decode step by {quantity}")
    for name, points in curves.items():
        for point in points:
            row = (f"{point.x:.0f}", f"{point.step_ms:.2f}", f"{point.limit_ms:.2f}")
            shown.add_row(name, *row, f"{point.limit_ms / point.step_ms:.0%}")
    return shown


def write_plot(path: Path, panels: Mapping[str, Curves]) -> None:
    """One panel for each thing that grows; dashed what reading alone would take."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(panels), 3.6), layout="constrained")
    for axes, (quantity, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _draw(axes, quantity, curves)
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, quantity: str, curves: Curves) -> None:
    for name, points in curves.items():
        x = [point.x for point in points]
        [line] = axes.plot(x, [point.step_ms for point in points], marker="o", label=name)
        axes.plot(x, [point.limit_ms for point in points], linestyle="--", color=line.get_color(), alpha=0.6)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{value:.0f}" for value in x])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(quantity)
    axes.set_ylabel("ms of a decode step")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def main() -> None:
    """Print a table for each thing that grows, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--streams", nargs="+", type=int, default=STREAMS)
    parser.add_argument("--sizes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture of the tables")
    asked = parser.parse_args()
    if asked.plot is not None:
        check_can_plot()
    # Streams of the longest context share the pool with more streams of a short one.
    most = max(MANY, *asked.streams)
    arm = Arm(asked.model, {}, streams=most, context=max(CONTEXT, *asked.contexts))
    panels = {
        "tokens of context": over_context(arm, asked.contexts, asked.rounds),
        "streams": over_streams(arm, asked.streams, asked.rounds),
    }
    del arm
    if asked.sizes:
        shapes = {name: SHAPES[name] for name in asked.sizes}
        panels["MB of weights"] = over_size(shapes, asked.model, asked.rounds)
    console = Console(width=100)
    for quantity, curves in panels.items():
        console.print(table(quantity, curves))
    if asked.plot is not None:
        write_plot(asked.plot, panels)


if __name__ == "__main__":
    main()
