"""`attn-demo` and `kv-demo`: the demos of a checkout that need no server."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from miniserve.errors import StartupError


def add_commands(commands: Any) -> None:
    """Add them to the command line."""
    attn_demo = commands.add_parser("attn-demo", help="watch the attention backends agree on a toy cache")
    attn_demo.set_defaults(command=_attn_demo)
    kv_demo = commands.add_parser("kv-demo", help="watch the KV cache manager hand out, share and evict blocks")
    kv_demo.add_argument("--no-pause", action="store_true", help="do not wait for a key between the steps")
    kv_demo.set_defaults(command=_kv_demo)


def _attn_demo(_args: argparse.Namespace) -> int:
    _demo("attn_demo").run()
    return 0


def _kv_demo(args: argparse.Namespace) -> int:
    _demo("kv_demo").run(pause=not args.no_pause)
    return 0


def _demo(name: str) -> Any:
    try:
        return import_module(f"demos.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("demos", f"demos.{name}"):
            raise
        raise StartupError("the demos are not part of the installed package; run main.py in a checkout") from None
