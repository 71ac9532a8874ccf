"""The flags of the terminal chat and their checks. Does not know what they are for."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Sequence


class Settings(argparse.Namespace):
    """What the flags asked. None leaves the choice to the server."""

    base_url: str = "http://127.0.0.1:8000/v1"
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    system: str | None = None
    api_key: str | None = None
    spawn: bool = False
    serve_args: Sequence[str] = ()


def parse_args(arguments: Sequence[str] | None = None) -> Settings:
    """The flags, checked."""
    parser = argparse.ArgumentParser(prog="tui.py", description="Chat with an OpenAI-compatible server.")
    parser.add_argument("--base-url", help=f"default: {Settings.base_url}")
    parser.add_argument("--model", help="its name on the server; default: the first that the server lists")
    parser.add_argument("--max-tokens", type=int, help="longest answer; default: the server's")
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: the server's")
    parser.add_argument("--system", help="system message of every conversation")
    parser.add_argument("--api-key", help="default: $MINISERVE_API_KEY")
    parser.add_argument("--spawn", action="store_true", help="start `main.py serve`, and stop it at the end")
    parser.add_argument("--serve-args", type=_split_flags, help="flags for it; write --serve-args='...'")
    # Attributes of Settings win over defaults of the parser.
    settings = parser.parse_args(arguments, Settings(api_key=os.environ.get("MINISERVE_API_KEY")))
    url = re.fullmatch(r"https?://([^/:\s]+|\[[\da-fA-F:]+\])(:(?P<port>\d{1,5}))?(/\S*)?", settings.base_url)
    if url is None or not 0 < int(url["port"] or 80) < 2**16:
        parser.error(f"--base-url must be like {Settings.base_url}, got {settings.base_url!r}")
    key = settings.api_key or ""
    if not (key.isascii() and key.isprintable()):
        parser.error("--api-key, or $MINISERVE_API_KEY, must be printable ASCII, without a line break, to be a header")
    if settings.temperature is not None and not 0 <= settings.temperature <= 2:
        parser.error(f"--temperature must be in [0, 2], got {settings.temperature}")
    if settings.serve_args and not settings.spawn:
        parser.error("--serve-args are for the server of --spawn; give both")
    if placed := [flag for flag in settings.serve_args if flag.partition("=")[0] in ("--host", "--port", "--uds")]:
        parser.error(f"--serve-args: {placed[0]} is what --base-url says; use that")
    return settings


def _split_flags(text: str) -> list[str]:
    """The flags in `text`, taken apart as a shell does."""
    try:
        return shlex.split(text)
    except ValueError:
        message = f"{text[:80]!r} has an open quote, or ends in a backslash; close the quote, or take it out"
        raise argparse.ArgumentTypeError(message) from None
