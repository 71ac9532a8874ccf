"""The `bench` command: the same prompts through each arm in turn, then one table.

Every run has a process and an engine of its own, one at a time: no arm waits beside another in memory, and no run finds
the prompts of an earlier one in its prefix cache. Within a run, only the prompts themselves share their beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from miniserve.benchmarks import hf_baseline, offline, report
from miniserve.benchmarks.arm import Load, Measurement, Progress, Worker
from miniserve.benchmarks.prompts import conversations
from miniserve.config import EngineConfig
from miniserve.errors import ConfigError

PREFIX_CACHE = "prefix cache"
NO_PREFIX_CACHE = "no prefix cache"
TRANSFORMERS = "transformers"

ProgressBar = Callable[[str], AbstractContextManager[Progress | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What was asked of the benchmark.

    Attributes:
        prefix_caching: the only setting to measure; None is both.
        hf_baseline: whether transformers takes part.
        repeat: runs of each arm.
        json: where to write all numbers.
        plot: where to draw them; a .png file.

    Raises:
        ConfigError: a value is out of range, or a file could not be written. Found before anything is measured.
    """

    num_prompts: int = 16
    max_tokens: int = 64
    repeat: int = 1
    prefix_caching: bool | None = None
    hf_baseline: bool = False
    json: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_tokens", "repeat"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        for flag, path in (("--json", self.json), ("--plot", self.plot)):
            if path is not None and (path.is_dir() or not path.parent.is_dir()):
                raise ConfigError(f"{flag} {path} cannot be written: it must be a file in a folder that exists")
        if self.json is not None and self.json == self.plot:
            raise ConfigError(f"--json and --plot are both {self.json}: give each a file of its own")
        if self.plot is not None:
            if self.plot.suffix != ".png":
                raise ConfigError(f"--plot {self.plot}: the plot is a PNG; name it {self.plot.with_suffix('.png')}")
            report.check_can_plot()


def bench(config: EngineConfig, options: BenchOptions, progress_bar: ProgressBar) -> None:
    """Measure, print the table to stdout, write the files.

    Args:
        config: of our engine; its `prefix_caching` is what the arms differ in.
        options: what to measure, and where to write it.
        progress_bar: shows the label and the progress while it is open.

    Raises:
        MiniserveError: an arm failed; the message begins with its name.
    """
    results: dict[str, list[Measurement]] = {}
    for number in range(1, options.repeat + 1):
        turn = f", run {number} of {options.repeat}" if options.repeat > 1 else ""
        prompts: Any = conversations(options.num_prompts)
        for name, (load, arm_config) in _arms(config, options).items():
            with Worker(name, load, arm_config, options.max_tokens) as worker:
                run = _run(worker, prompts, name + turn, progress_bar)
            results.setdefault(name, []).append(run)
            prompts = run.prompts  # our engine has rendered and tokenised; the others get the same token ids
    title = f"{config.model}, {options.num_prompts} prompts, {options.max_tokens} tokens each"
    console = Console()
    console.print(report.table(results, title, console.width))
    if options.json is not None:
        report.write_json(options.json, results, _settings(config, options))
    if options.plot is not None:
        report.write_plot(options.plot, results, title)


def _arms(config: EngineConfig, options: BenchOptions) -> dict[str, tuple[Load, EngineConfig]]:
    """In the order of their turns. Ours come first: they turn conversations into token ids."""
    wanted = (True, False) if options.prefix_caching is None else (options.prefix_caching,)
    arms: dict[str, tuple[Load, EngineConfig]] = {
        PREFIX_CACHE if prefix_caching else NO_PREFIX_CACHE: (
            offline.load,
            replace(config, prefix_caching=prefix_caching),
        )
        for prefix_caching in wanted
    }
    return arms | ({TRANSFORMERS: (hf_baseline.load, config)} if options.hf_baseline else {})


def _run(worker: Worker, prompts: Any, label: str, progress_bar: ProgressBar) -> Measurement:
    with progress_bar(f"{label}: loading") as progress:
        worker.wait_until_loaded(progress)
    with progress_bar(f"{label}: generating") as progress:
        return worker.run(prompts, progress)


def _settings(config: EngineConfig, options: BenchOptions) -> dict[str, Any]:
    asked = {name: value for name, value in asdict(config).items() if name != "prefix_caching"}
    return {
        "num_prompts": options.num_prompts,
        "max_tokens": options.max_tokens,
        "repeat": options.repeat,
        "engine": asked,
    }
