"""What the comparison tells: a Markdown table a workload, and a plot. Medians over the rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from miniserve.benchmarks.peers.arms import LLAMA
from miniserve.benchmarks.peers.load import Figures, Workload
from miniserve.benchmarks.peers.results import Comparison
from miniserve.benchmarks.peers.setup import LLAMA_PACKAGE
from miniserve.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTHING = "-"
HEADER = ("arm", "out tok/s", "of the first", "TTFT", "ITL", "TPOT", "rounds")
MAX_REASON = 160  # characters


@dataclass(frozen=True, slots=True)
class Row:
    """An arm in a workload: the figures of its rounds, and how many failed."""

    arm: str
    figures: tuple[Figures, ...]
    failures: int

    def median(self, name: str) -> float | None:
        """Of a figure, over the rounds that have it."""
        values = self.values(name)
        return statistics.median(values) if values else None

    def values(self, name: str) -> list[float]:
        """Of a figure, in the order of the rounds."""
        return [value for figures in self.figures if (value := getattr(figures, name)) is not None]


def rows(comparison: Comparison, model: str, workload: Workload) -> list[Row]:
    """One an arm that was tried, in the order of the arms."""
    made = []
    for arm in comparison.arms:
        turns = [turn for turn in comparison.turns if (turn.model, turn.arm) == (model, arm)]
        figures = tuple(turn.figures[workload.name] for turn in turns if workload.name in turn.figures)
        failures = sum(workload.name in turn.errors or "" in turn.errors for turn in turns)
        if figures or failures:
            made.append(Row(arm, figures, failures))
    return made


def markdown(comparison: Comparison) -> str:
    """The tables, what was left out and why, and how fast the machine was meanwhile."""
    parts = [_machine(comparison)]
    for model in comparison.models:
        for workload in comparison.workloads:
            parts += [f"### {model}, {workload.name}", _describe(workload), _table(rows(comparison, model, workload))]
        parts.append("\n".join(_notes(comparison, model)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine(comparison: Comparison) -> str:
    names = {LLAMA: f"{LLAMA} from {LLAMA_PACKAGE}"}  # the package's version, not llama.cpp's own
    versions = ", ".join(f"{names.get(peer, peer)} {version}" for peer, version in comparison.versions.items())
    rounds = f"Medians (minimum to maximum) of up to {comparison.rounds} rounds on {len(comparison.cores)} cores."
    return f"{rounds} Peers: {versions or 'none'}."


def _describe(workload: Workload) -> str:
    turns = f", {workload.turns} in a row each" if workload.turns > 1 else ""
    streams = "1 stream" if workload.streams == 1 else f"{workload.streams} streams"
    return f"{streams}{turns}, {workload.prompt_tokens} tokens in, {workload.output_tokens} out."


def _table(made: Sequence[Row]) -> str:
    if not made:
        return "Nothing was measured."
    base = next((rate for row in made if (rate := row.median("output_tokens_per_second"))), None)
    lines = [HEADER, ("---", *("---:" for _ in HEADER[1:])), *(_cells(row, base) for row in made)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(row: Row, base: float | None) -> tuple[str, ...]:
    rates = row.values("output_tokens_per_second")
    rate = row.median("output_tokens_per_second")
    spread = f"{rate:.1f} ({min(rates):.1f} to {max(rates):.1f})" if rate is not None else NOTHING
    share = f"{rate / base:.2f}" if rate is not None and base else NOTHING
    times = (_milliseconds(row.median(name)) for name in ("ttft", "itl", "tpot"))
    failed = f", {row.failures} failed" if row.failures else ""
    return (row.arm, spread, share, *times, f"{len(row.figures)}{failed}")


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1}f} ms"


def _notes(comparison: Comparison, model: str) -> Iterable[str]:
    turns = [turn for turn in comparison.turns if turn.model == model]
    if turns:
        read = _spread([turn.speed.gigabytes_per_second for turn in turns], "{:.1f}".format)
        products = _spread([turn.speed.teraflops for turn in turns], "{:.2f}".format)
        yield f"The machine before each turn: {read} GB/s read from memory, {products} TFLOP/s in bf16 products."
    for arm, reason in comparison.left_out.get(model, {}).items():
        yield f"- {arm} was left out: {_short(reason)}"
    for turn in turns:
        for workload, error in turn.errors.items():
            yield f"- {turn.arm}, round {turn.round}{f', {workload}' if workload else ''}: {_short(error)}"


def _spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    return f"{form(statistics.median(values))} ({form(min(values))} to {form(max(values))})"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}..."


# The plot


def write_plot(path: Path, comparison: Comparison) -> None:
    """A PNG: a row a model, a panel a workload, a bar an arm, with lines from the slowest to the fastest round.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    num_models, num_workloads = len(comparison.models), len(comparison.workloads)
    height = (0.4 * len(comparison.arms) + 1.2) * num_models
    figure = Figure(figsize=(5 * num_workloads + 2, height), layout="constrained")
    panels = figure.subplots(num_models, num_workloads, squeeze=False)
    for model, line in zip(comparison.models, panels, strict=True):
        for workload, axes in zip(comparison.workloads, line, strict=True):
            _bars(axes, f"{model}, {workload.name}", rows(comparison, model, workload))
    figure.supxlabel("output tokens per second, all streams together", fontsize="medium")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _bars(axes: Axes, title: str, made: Sequence[Row]) -> None:
    shown = [row for row in made if row.figures]
    rates = [row.values("output_tokens_per_second") for row in shown]
    middles = [statistics.median(values) for values in rates]
    below = [middle - min(values) for middle, values in zip(middles, rates, strict=True)]
    above = [max(values) - middle for middle, values in zip(middles, rates, strict=True)]
    colours = ["C0" if row.arm.startswith("miniserve") else "C7" for row in shown]
    bars = axes.barh([row.arm for row in shown], middles, xerr=[below, above], color=colours, capsize=2)
    axes.bar_label(bars, fmt="%.3g", label_type="center", color="white")
    axes.invert_yaxis()  # the first arm on top
    axes.set_title(title, fontsize="medium")
