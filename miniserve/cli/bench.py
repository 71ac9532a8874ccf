"""`bench`: throughput and latency, with and without prefix caching."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from miniserve.cli.console import fail, progress_bar
from miniserve.cli.flags import Parser, add_config_flags, engine_config, parse_with
from miniserve.config import EngineConfig
from miniserve.errors import InternalError, RequestError


def add_command(commands: Any) -> None:
    """Add it to the command line."""
    parser = commands.add_parser("bench", help="measure throughput and latency, with and without prefix caching")
    _add_flags(parser)
    add_config_flags(parser, "engine", EngineConfig)
    parser.set_defaults(command=_bench)


def _add_flags(parser: Parser) -> None:
    parser.description = (
        "Run the same prompts through miniserve with and without prefix caching (with --prefix-caching or "
        "--no-prefix-caching only so), each time in a process of its own, and print one table."
    )
    group = parser.add_argument_group("benchmark")
    group.add_argument("--num-prompts", type=parse_with(int), default=16, metavar="N", help="(default: 16)")
    group.add_argument(
        "--max-tokens", type=parse_with(int), default=64, metavar="N", help="generated for each prompt (default: 64)"
    )
    group.add_argument("--hf-baseline", action="store_true", help="also measure transformers' static batching")
    group.add_argument(
        "--repeat", type=parse_with(int), default=1, metavar="N", help="runs of each arm; medians count (default: 1)"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them; needs matplotlib")


def _bench(args: argparse.Namespace) -> int:
    from miniserve.benchmarks.bench import BenchOptions, bench

    config = engine_config(args)
    options = BenchOptions(
        num_prompts=args.num_prompts,
        max_tokens=args.max_tokens,
        repeat=args.repeat,
        prefix_caching=getattr(args, "prefix_caching", None),
        hf_baseline=args.hf_baseline,
        json=args.json,
        plot=args.plot,
    )
    try:
        bench(config, options, progress_bar)
    except RequestError as error:  # the prompts are ours: what does not fit was asked for with a flag
        return fail(str(error), 2)
    except InternalError as error:
        return fail(str(error), 1)
    return 0
