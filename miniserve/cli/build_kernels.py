"""`build-kernels`: compile the native kernels ahead of time."""

from __future__ import annotations

import argparse
from typing import Any

from miniserve.cli.console import say


def add_command(commands: Any) -> None:
    """Add it to the command line."""
    parser = commands.add_parser("build-kernels", help="compile the native kernels for this machine ahead of time")
    parser.set_defaults(command=_build_kernels)


def _build_kernels(_args: argparse.Namespace) -> int:
    from miniserve import platform
    from miniserve.kernels.build import build
    from miniserve.kernels.load import best_instruction_set

    print(build(best_instruction_set(platform.detect().instruction_sets), progress=say).path)
    return 0
