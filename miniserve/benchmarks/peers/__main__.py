"""The commands: setup (once), run (the measurement), report (the tables and the plot again, from the numbers)."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from miniserve.benchmarks.peers.arms import ARMS, MINISERVE, select_arms
from miniserve.benchmarks.peers.load import WORKLOADS, select_workloads
from miniserve.benchmarks.peers.models import WRITERS, model_parts
from miniserve.benchmarks.peers.places import Places, default_folder
from miniserve.benchmarks.peers.report import markdown, write_plot
from miniserve.benchmarks.peers.results import Comparison, read_comparison, write_comparison
from miniserve.benchmarks.peers.rounds import compare, plan_comparison
from miniserve.benchmarks.peers.setup import PEERS, read_state, set_up
from miniserve.benchmarks.report import check_can_plot
from miniserve.errors import ConfigError, MiniserveError

NUMBERS = "peers.json"
TABLES = "peers.md"
PLOT = "peers.png"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it did all of it."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.command(args)
        return code
    except MiniserveError as error:
        print(f"peers: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("peers: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    import miniserve.benchmarks.peers as package

    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="peers", description=package.__doc__, formatter_class=plain)
    commands = parser.add_subparsers(required=True, metavar="setup | run | report")

    setup = commands.add_parser("setup", help="install the peers and write the models; what is there stays")
    setup.add_argument("--peers", nargs="+", choices=[part.name for part in PEERS], metavar="PEER", help="default: all")
    setup.add_argument("--jobs", type=int, default=2, help="compilers at once (default: 2)")
    setup.set_defaults(command=_setup)

    run = commands.add_parser("run", help="measure, and write the numbers, the tables and the plot")
    arms = "; ".join(arm.name for arm in ARMS)
    run.add_argument("--arms", nargs="+", default=(), metavar="ARM", help=f"default: all: {arms}")
    workloads = "; ".join(workload.name for workload in WORKLOADS)
    run.add_argument("--workloads", nargs="+", default=(), metavar="LOAD", help=f"default: all: {workloads}")
    run.add_argument("--rounds", type=int, default=5, help="turns of each arm (default: 5)")
    run.set_defaults(command=_run)

    report = commands.add_parser("report", help=f"write {TABLES} and {PLOT} again, from {NUMBERS}")
    report.set_defaults(command=_report)

    for command in (setup, run):
        command.add_argument("--dir", type=Path, default=default_folder(), help="of the peers (default: %(default)s)")
        names = list(WRITERS)
        command.add_argument("--models", nargs="+", choices=names, default=names, metavar="MODEL", help="default: all")
    for command in (run, report):
        command.add_argument(
            "--out", type=Path, default=Path("output/peers"), help="folder of the results (default: %(default)s)"
        )
    return parser


def _setup(args: argparse.Namespace) -> int:
    peers = [part for part in PEERS if args.peers is None or part.name in args.peers]
    names = {MINISERVE, *(part.name for part in peers)}
    forms = {arm.form for arm in ARMS if arm.peer in names}
    parts = [*peers, *model_parts(args.models, sorted(forms))]
    state = set_up(parts, Places(args.dir.resolve()), args.jobs, print)
    failures = {part.name: state.failures[part.name] for part in parts if part.name in state.failures}
    for name, reason in failures.items():
        print(f"{name} could not be set up, and is left out: {reason}", file=sys.stderr)
    return 1 if failures else 0


def _run(args: argparse.Namespace) -> int:
    check_can_plot()
    places = Places(args.dir.resolve())
    arms = select_arms(args.arms)
    plan = plan_comparison(arms, args.models, select_workloads(args.workloads), args.rounds, read_state(places))
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {args.out} cannot be made: {error.strerror}") from error
    for model, reasons in plan.left_out.items():
        for arm, reason in reasons.items():
            print(f"{model}: {arm} is left out: {reason}", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without ending the server that runs
    compare(plan, arms, places, lambda results: write_comparison(args.out / NUMBERS, results), _tell)
    return _report(args)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _report(args: argparse.Namespace) -> int:
    check_can_plot()
    comparison: Comparison = read_comparison(args.out / NUMBERS)
    text = markdown(comparison)
    (args.out / TABLES).write_text(text, encoding="utf-8")
    write_plot(args.out / PLOT, comparison)
    print(text, end="")
    return 1 if any(turn.errors for turn in comparison.turns) else 0


if __name__ == "__main__":
    sys.exit(main())
