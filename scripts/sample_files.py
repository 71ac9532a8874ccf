"""What lies in output/: the list of its files, its README, and how a finished run takes the place of the last one.

Does not know how a file is made.
"""

from __future__ import annotations

import os
import platform as python_platform
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from miniserve import platform

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "output"
INPUT = "input-chat-completions.json"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file of output/.

    Attributes:
        made_by: the command that has the same effect as this part of the run, in Markdown.
        is_picture: needs programs that may be missing: then the last run's stays.
    """

    name: str
    what: str
    made_by: str
    is_picture: bool = False


def artifacts(serve: str, serve_long: str, load: str, load_long: str) -> tuple[Artifact, ...]:
    """All files but README.md and the input; the arguments are the commands of this run."""
    curl = "curl http://127.0.0.1:8000"
    chat, stats, metrics, plot = (
        "`uv run tui.py`, two questions",
        f"`{curl}/stats`",
        f"`{curl}/metrics`",
        "`make sample-run`",
    )
    serve, serve_long, load, load_long = (f"`uv run {command}`" for command in (serve, serve_long, load, load_long))
    return (
        Artifact("miniserve-serve.log", "log of the server that all but the long run talked to", serve),
        Artifact(
            "output-chat-completions.json",
            f"its answer to `{INPUT}`",
            f"`{curl}/v1/chat/completions -H 'Content-Type: application/json' -d @output/{INPUT}`",
        ),
        Artifact(
            "input-and-output-chat-stream.sse",
            "a streamed chat as it comes over the wire; the first line is the request",
            "the command in its first line",
        ),
        Artifact("tui.svg", "the terminal chat: the second answer took most of its prompt from the prefix cache", chat),
        Artifact("tui.png", "the same as pixels", "Chromium, of tui.svg", is_picture=True),
        Artifact("load-run.jsonl", "a short load: one line a request, as the client saw it", load),
        Artifact("load-run-summary.txt", "its rates and percentiles, and the most the server held", load),
        Artifact("stats-load-run.jsonl", "/stats during it, four times a second", stats),
        Artifact("load-run.png", "both over time: latencies, KV cache, running and waiting requests", plot),
        Artifact("output-metrics.txt", "/metrics after it", metrics),
        Artifact(
            "prometheus-targets.png",
            "Prometheus scraping this server, with the configuration of deploy/prometheus",
            "Chromium, of Prometheus' /targets",
            is_picture=True,
        ),
        Artifact("miniserve-serve-long.log", "log of a second server, for the long run", serve_long),
        Artifact("load-run-long.jsonl", "more requests than run at once, with long prompts: they queue", load_long),
        Artifact("long-run-summary.txt", "its rates and percentiles, and the most the server held", load_long),
        Artifact("stats-load-run-long.jsonl", "/stats during it, four times a second", stats),
        Artifact("load-run-long.png", "both over time", plot),
        Artifact("stats-long-run.json", "/stats after it", stats),
        Artifact("metrics-long-run.txt", "/metrics after it", metrics),
    )


def readme(files: Sequence[Artifact], with_pictures: bool) -> str:
    """The table of the files, when and on what they were made."""
    rows = [f"| [{each.name}]({each.name}) | {each.what} | {each.made_by} |" for each in files]
    pictures = ", ".join(each.name for each in files if each.is_picture)
    older = () if with_pictures else ("", f"Made with `--skip-pictures`: {pictures} are older, if there at all.")
    return "\n".join(
        (
            "# A sample run",
            "",
            f"`make sample-run` wrote these files on {datetime.now(UTC):%Y-%m-%d}, all with the embedded model, "
            "SmolLM2-135M-Instruct.",
            f"The machine: {machine()}.",
            *older,
            "",
            "| file | what | the same by hand |",
            "|---|---|---|",
            f"| [{INPUT}]({INPUT}) | a request; the only file that is not made by the run | |",
            *rows,
            "",
            "[soak/report.md](soak/report.md) is of another run, `make soak`: half an hour of mixed traffic.",
            "",
            "By hand, the server listens on its default port, 8000; this run's had another: see the stream's line 1."
            " The logs are without the lines of `/stats`.",
            "",
        )
    )


def machine() -> str:
    """The hardware and the versions that matter for the numbers, in words."""
    import psutil

    found = platform.detect()
    bf16 = "with" if found.cpu_has_bf16 else "without"
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{found.physical_cores} CPU cores ({python_platform.machine()}, {bf16} bf16 instructions), "
        f"{memory:.0f} GiB of memory, {python_platform.system()}, Python {python_platform.python_version()}, "
        f"torch {version('torch')}"
    )


def check_complete(folder: Path, files: Iterable[Artifact], with_pictures: bool) -> None:
    """Whether the run made what it should, and nothing tells where.

    Raises:
        ValueError: a file is missing, empty, or names a folder of this machine.
    """
    for each in files:
        file = folder / each.name
        if each.is_picture and not with_pictures:
            continue
        if not file.exists() or not file.stat().st_size:
            raise ValueError(f"the run did not make {each.name}")
        data = file.read_bytes()
        if named := next((path for path in _own_paths() if os.fsencode(path) in data), None):
            raise ValueError(f"{each.name} names a folder of this machine: {named}")


def _own_paths() -> tuple[str, ...]:
    return (str(ROOT), sysconfig.get_path("purelib"), f"{tempfile.gettempdir()}/")


def publish(made: Path, output: Path) -> None:
    """Put the files of `made` into `output`, all or none. What only `output` has stays."""
    fresh, old = output.with_name(f"{output.name}.new"), output.with_name(f"{output.name}.old")
    for left in (fresh, old):  # by a run that was killed here
        shutil.rmtree(left, ignore_errors=True)
    try:
        shutil.copytree(output, fresh)
        shutil.copytree(made, fresh, dirs_exist_ok=True)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    output.rename(old)
    fresh.rename(output)
    shutil.rmtree(old)
