"""What a benchmark tells: the table on the terminal, the JSON file, the plot. Medians over the repeats of each arm."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from miniserve.benchmarks.arm import Measurement
from miniserve.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Results = Mapping[str, Sequence[Measurement]]  # arm -> its runs
Metrics = dict[str, float | None]  # None: the arm cannot tell


def _duration(seconds: float) -> str:
    decimals = 3 if seconds < 1 else 2 if seconds < 100 else 0
    return f"{seconds:.{decimals}f}s"


# Column, metric, and how its numbers are written.
COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("req/s", "requests_per_second", "{:.2f}".format),
    ("out tok/s", "output_tokens_per_second", "{:.1f}".format),
    ("tot tok/s", "total_tokens_per_second", "{:.1f}".format),
    ("p50 ttft", "p50_ttft_seconds", _duration),
    ("p50 latency", "p50_latency_seconds", _duration),
    ("p90 latency", "p90_latency_seconds", _duration),
    ("cached", "cached_share", "{:.0%}".format),
)
FULL_WIDTH = 75
_LEFT_OUT = ("req/s", "tot tok/s", "p90 latency")


def metrics(run: Measurement) -> Metrics:
    """Rates, percentiles and counts of one run."""
    values: Metrics = {
        "seconds": run.seconds,
        "requests_per_second": len(run.latencies) / run.seconds,
        "output_tokens_per_second": run.completion_tokens / run.seconds,
        "total_tokens_per_second": (run.prompt_tokens + run.completion_tokens) / run.seconds,
        "p50_ttft_seconds": percentile(run.first_tokens, 50) if run.first_tokens else None,
        "p50_latency_seconds": percentile(run.latencies, 50),
        "p90_latency_seconds": percentile(run.latencies, 90),
        "cached_share": run.cached_tokens / run.prompt_tokens,
        "prompt_tokens": run.prompt_tokens,
        "completion_tokens": run.completion_tokens,
        "cached_tokens": run.cached_tokens,
    }
    return values if run.padded_prompt_tokens is None else values | {"padded_prompt_tokens": run.padded_prompt_tokens}


def percentile(values: Sequence[float], percent: int) -> float:
    """Linear between the two nearest of the sorted values."""
    ordered = sorted(values)
    whole, hundredths = divmod(percent * (len(ordered) - 1), 100)
    above = ordered[min(whole + 1, len(ordered) - 1)]
    return ordered[whole] + (above - ordered[whole]) * hundredths / 100


def medians(runs: Sequence[Measurement]) -> Metrics:
    """Of each metric, over the runs of one arm."""
    columns: dict[str, list[float | None]] = {}
    for run in runs:
        for name, value in metrics(run).items():
            columns.setdefault(name, []).append(value)
    return {name: _median(values) for name, values in columns.items()}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def table(results: Results, title: str, width: int = FULL_WIDTH) -> Table:
    """One row an arm. In less than `FULL_WIDTH` columns of text, without what can be told from the rest."""
    columns = [column for column in COLUMNS if width >= FULL_WIDTH or column[0] not in _LEFT_OUT]
    grid = Table(title=title, caption=_caption(results), box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    grid.title_justify = grid.caption_justify = "left"
    grid.add_column("arm", no_wrap=True)
    for header, _, _ in columns:
        grid.add_column(header, justify="right", overflow="fold")  # a header may wrap
    for arm, runs in results.items():
        values = medians(runs)
        cells = (("-" if (value := values[name]) is None else form(value)) for _, name, form in columns)
        grid.add_row(arm, *cells)
    return grid


def _caption(results: Results) -> str | None:
    num_runs = len(next(iter(results.values())))
    return f"medians of {num_runs} runs" if num_runs > 1 else None


def write_json(path: Path, results: Results, settings: Mapping[str, Any]) -> None:
    """`settings`, and for each arm its medians and the metrics of every run.

    Raises:
        ConfigError: the file cannot be written.
    """
    arms = {arm: {**medians(runs), "runs": [metrics(run) for run in runs]} for arm, runs in results.items()}
    text = json.dumps({"settings": settings, "arms": arms}, indent=2, ensure_ascii=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from error


# The plot


def check_can_plot() -> None:
    """Before anything is measured.

    Raises:
        ConfigError: matplotlib is missing.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; run: uv sync --group dev")


def write_plot(path: Path, results: Results, title: str) -> None:
    """A PNG with one panel a question: how much, how soon, how long.

    Raises:
        ConfigError: the file cannot be written.
    """
    check_can_plot()
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=(12, 4), layout="constrained")
    rates, first, latencies = figure.subplots(1, 3)
    values = {arm: medians(runs) for arm, runs in results.items()}
    _bars(rates, "output tokens per second", values, ("output_tokens_per_second",))
    _bars(first, "time to first token in seconds, median", values, ("p50_ttft_seconds",))
    _bars(latencies, "latency in seconds, p50 and p90", values, ("p50_latency_seconds", "p90_latency_seconds"))
    figure.suptitle(title)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}") from error


def _bars(axes: Axes, title: str, values: Mapping[str, Metrics], names: Sequence[str]) -> None:
    """A group of bars for each arm that knows all of `names`."""
    known = {arm: numbers for arm, metric in values.items() if (numbers := _numbers(metric, names)) is not None}
    width = 0.8 / len(names)
    for number in range(len(names)):
        offset = (number - (len(names) - 1) / 2) * width
        places = [index + offset for index in range(len(known))]
        bars = axes.bar(places, [numbers[number] for numbers in known.values()], width * 0.95)
        axes.bar_label(bars, fmt="%.3g")
    axes.margins(y=0.1)  # room for the labels
    axes.set_xticks(range(len(known)), list(known))
    axes.set_title(title, fontsize="medium")


def _numbers(values: Metrics, names: Sequence[str]) -> list[float] | None:
    numbers = [value for name in names if (value := values[name]) is not None]
    return numbers if len(numbers) == len(names) else None
