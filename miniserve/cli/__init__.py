"""The command line: one module a command, and what each prints. Heavy imports wait until a command needs them.

The flags of the engine and of the server are generated from their config classes. Text goes to stdout, everything about
it to stderr. Exit codes: 0 done, 1 the answer failed, 2 asked for something that cannot be done, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from miniserve.cli import bench, build_kernels, demos, generate, serve
from miniserve.cli.console import INTERRUPTED, fail
from miniserve.cli.flags import Parser
from miniserve.errors import InternalError, RequestError, StartupError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    _open_standard_files()
    try:
        try:
            args = _parser().parse_args(argv)
            code: int = args.command(args)
            return code
        finally:
            print(end="", flush=True)  # a reader that has gone is noticed here, not at the interpreter's exit
    except StartupError as error:
        return fail(str(error), 2)
    except (RequestError, InternalError) as error:
        return fail(str(error), 1)
    except KeyboardInterrupt:
        return fail("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        # What is still buffered has to go somewhere, or the interpreter complains about it at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _open_standard_files() -> None:
    """Where the process was started without some of them: or sockets get their numbers, on which libraries rely."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


def _parser() -> Parser:
    parser = Parser(prog="miniserve", description="An LLM inference server to read, to watch and to trust.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)
    for add in (generate.add_command, serve.add_command, bench.add_command, build_kernels.add_command):
        add(commands)
    demos.add_commands(commands)
    return parser
