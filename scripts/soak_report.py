"""What a soak shows: is everything flat, was every answer right; as a page, and as a picture.

Judges and draws what it is given. Does not know where outcomes and samples come from.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from demos.load_client import percentile
from scripts.soak_traffic import ABORTED, FAILED, RIGHT, WRONG, Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MB = 2**20
MOST_GROWTH = 50  # MB
MOST_MORE_FILES, MOST_MORE_THREADS = 8, 2
MOST_SLOWER = 2.0  # the last cycle's p99 over the first's: the machine has other work too
MOST_DETAILS = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment. `seconds` since the start of the traffic; `rss` in bytes."""

    seconds: float
    cycle: int
    clients: int
    rss: int
    fds: int
    threads: int
    running: int
    waiting: int
    kv_blocks_used: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Soak:
    """A finished run.

    Attributes:
        command: what made it.
        machine: on what, in words.
        phases: (seconds, clients) of one cycle, which was repeated `num_cycles` times.
        idle: the server after the last answer.
        exit_code: of the server, after SIGTERM.
        has_traceback: whether its log has one.
    """

    command: str
    machine: str
    phases: Sequence[tuple[float, int]]
    num_cycles: int
    outcomes: Sequence[Outcome]
    samples: Sequence[Sample]
    idle: Sample
    exit_code: int
    has_traceback: bool

    @property
    def cycle_seconds(self) -> float:
        """How long a cycle takes."""
        return sum(seconds for seconds, _ in self.phases)

    def cycle_of(self, outcome: Outcome) -> int:
        """In which cycle it ended; what ended after the last one belongs to it."""
        return min(int(outcome.ended_at / self.cycle_seconds), self.num_cycles - 1)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold, what was found, and whether it holds."""

    what: str
    found: str
    holds: bool


# The judgement


def checks(soak: Soak) -> list[Check]:
    """All that must hold. The first cycle is the warm-up: the last one must take no more than it."""
    bad = [each for each in soak.outcomes if each.verdict in (WRONG, FAILED)]
    first, last = (_of_cycle(soak, cycle) for cycle in (0, soak.num_cycles - 1))
    idle = soak.idle
    held = (idle.running, idle.waiting, idle.kv_blocks_used)
    return [
        Check("every answer is the golden one, every refusal the right one", f"{len(bad)} are not", not bad),
        _grown(
            "memory (MB), most in the last cycle and in the first", first, last, lambda each: each.rss / MB, MOST_GROWTH
        ),
        _grown("open files, most in both", first, last, lambda each: each.fds, MOST_MORE_FILES),
        _grown("threads, most in both", first, last, lambda each: each.threads, MOST_MORE_THREADS),
        *_slower(soak),
        Check("at the end nothing runs or waits, all KV blocks are free", f"{held}", held == (0, 0, 0)),
        Check("the server ends with 0 on SIGTERM", f"{soak.exit_code}", soak.exit_code == 0),
        Check("its log has no traceback", "one" if soak.has_traceback else "none", not soak.has_traceback),
    ]


def _of_cycle(soak: Soak, cycle: int) -> list[Sample]:
    return [sample for sample in soak.samples if sample.cycle == cycle]


def _grown(what: str, first: list[Sample], last: list[Sample], value: Callable[[Sample], float], most: int) -> Check:
    before, after = max(map(value, first)), max(map(value, last))
    return Check(what, f"{after:.0f} and {before:.0f}", after - before <= most)


def _slower(soak: Soak) -> list[Check]:
    found = []
    for clients in sorted({clients for _, clients in soak.phases}):
        before, after = (percentile(_seconds(soak, cycle, clients) or [0.0], 99) for cycle in (0, soak.num_cycles - 1))
        what = f"seconds of an answer, p99 at {clients} clients, in the last cycle and in the first"
        found.append(Check(what, f"{after:.2f} and {before:.2f}", after <= MOST_SLOWER * before))
    return found


def _seconds(soak: Soak, cycle: int, clients: int) -> list[float]:
    return [
        each.seconds
        for each in soak.outcomes
        if each.verdict == RIGHT and each.clients == clients and soak.cycle_of(each) == cycle
    ]


# The page


def report(soak: Soak) -> str:
    """A page in Markdown."""
    minutes = soak.cycle_seconds * soak.num_cycles / 60
    phases = ", ".join(f"{seconds / 60:.2g} min of {clients}" for seconds, clients in soak.phases)
    rows = checks(soak)
    holds = all(check.holds for check in rows)
    details = [f"- {each.kind}: {each.verdict}: {each.detail}" for each in soak.outcomes if each.detail]
    return "\n".join(
        [
            "# Soak",
            "",
            f"`{soak.command}`: {minutes:g} minutes of mixed traffic on one server, in {soak.num_cycles} cycles: "
            f"{phases} clients, each asking without pause.",
            f"The machine: {soak.machine}.",
            "",
            f"**{'Everything holds.' if holds else 'NOT everything holds.'}**",
            "",
            "| what | found | holds |",
            "|---|---|---|",
            *(f"| {check.what} | {check.found} | {'yes' if check.holds else '**no**'} |" for check in rows),
            "",
            "## The requests",
            "",
            *_kinds(soak.outcomes),
            "",
            "## The cycles",
            "",
            *_cycles(soak),
            "",
            *(["## What went wrong", "", *details[:MOST_DETAILS], ""] if details else []),
            "![the run](soak.png)",
            "",
        ]
    )


def _kinds(outcomes: Sequence[Outcome]) -> list[str]:
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for each in outcomes:
        by_kind[each.kind].append(each)
    rows = ["| kind | requests | right | aborted by the client | wrong | failed |", "|---|---|---|---|---|---|"]
    for kind, group in [*sorted(by_kind.items()), ("all", list(outcomes))]:
        counts = [sum(each.verdict == verdict for each in group) for verdict in (RIGHT, ABORTED, WRONG, FAILED)]
        rows.append(f"| {kind} | {len(group)} | {' | '.join(map(str, counts))} |")
    return rows


def _cycles(soak: Soak) -> list[str]:
    rows = [
        "| cycle | clients | answers | p50 s | p99 s | memory MB | files | threads | most KV blocks | preemptions |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cycle in range(soak.num_cycles):
        for _, clients in soak.phases:
            seconds = _seconds(soak, cycle, clients)
            samples = [each for each in _of_cycle(soak, cycle) if each.clients == clients]
            if seconds and samples:
                rows.append(_cycle_row(cycle, clients, seconds, samples))
    return rows


def _cycle_row(cycle: int, clients: int, seconds: Sequence[float], samples: Sequence[Sample]) -> str:
    last = samples[-1]
    held = max(sample.kv_blocks_used for sample in samples)
    preemptions = last.preemptions - samples[0].preemptions
    times = " | ".join(f"{percentile(seconds, percent):.2f}" for percent in (50, 99))
    counts = (last.fds, last.threads, held, preemptions)
    return (
        f"| {cycle + 1} | {clients} | {len(seconds)} | {times} | {last.rss / MB:.0f} | {' | '.join(map(str, counts))} |"
    )


# The picture


def write(soak: Soak, folder: Path) -> None:
    """report.md, soak.png and samples.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(report(soak), encoding="utf-8")
    rows = (json.dumps({**asdict(sample), "seconds": round(sample.seconds, 1)}) for sample in soak.samples)
    (folder / "samples.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    figure(soak).savefig(folder / "soak.png", format="png", dpi=110)


def figure(soak: Soak) -> Figure:
    """Five panels over the minutes: latency, memory, files and threads, KV blocks, requests."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    drawn = Figure(figsize=(10, 12), layout="constrained")
    panels = drawn.subplots(5, 1, sharex=True, height_ratios=(3, 2, 2, 2, 2))
    _latency(panels[0], soak)
    _lines(panels[1], soak, "memory of the server, MB", {"": lambda each: each.rss / MB})
    _lines(
        panels[2], soak, "open files, threads", {"files": lambda each: each.fds, "threads": lambda each: each.threads}
    )
    _lines(panels[3], soak, "KV blocks in use", {"": lambda each: each.kv_blocks_used})
    _lines(
        panels[4],
        soak,
        "requests in the engine; clients",
        {
            "running": lambda each: each.running,
            "waiting": lambda each: each.waiting,
            "clients": lambda each: each.clients,
        },
    )
    for axes in panels:
        axes.set_ylim(0, 1.1 * max(axes.dataLim.ymax, 1.0))  # what is flat is not to lie on the frame
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("minutes")
    drawn.suptitle(f"{soak.command}: {len(soak.outcomes)} requests")
    return drawn


def _latency(axes: Axes, soak: Soak) -> None:
    """Of the answers that ended within each half minute."""
    by_time: dict[int, list[float]] = defaultdict(list)
    for each in soak.outcomes:
        if each.verdict == RIGHT:
            by_time[int(each.ended_at / 30)].append(each.seconds)
    times = [(half + 0.5) / 2 for half in sorted(by_time)]
    for percent in (99, 50):
        axes.plot(times, [percentile(by_time[half], percent) for half in sorted(by_time)], label=f"p{percent}")
    axes.set_title("seconds of an answer, of those that ended within half a minute", fontsize="medium")
    axes.legend()


def _lines(axes: Axes, soak: Soak, title: str, values: dict[str, Callable[[Sample], float]]) -> None:
    minutes = [sample.seconds / 60 for sample in soak.samples]
    for label, value in values.items():
        axes.plot(minutes, [value(sample) for sample in soak.samples], label=label, linewidth=1)
    axes.set_title(title, fontsize="medium")
    if all(values):
        axes.legend()
