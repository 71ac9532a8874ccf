"""Flags, from what a config class has as fields, and back. Does not know the commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn

from miniserve.config import EngineConfig, FlagInfo, ServerConfig, flag_info, flag_name


class Parser(argparse.ArgumentParser):
    """argparse, with errors in one line and exit code 2, and flags spelled out in full."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def add_config_flags(parser: Parser, title: str, config: type[EngineConfig] | type[ServerConfig]) -> None:
    """One flag per field of `config`, with its default, choices and help. Absent flags stay absent."""
    group = parser.add_argument_group(title)
    for config_field in fields(config):
        name, default = flag_name(config_field.name), config_field.default
        if isinstance(default, bool):
            group.add_argument(
                name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=f"{flag_info(config_field).help} (default: {'on' if default else 'off'})",
            )
        else:
            metavar = config_field.name.upper().split("_")[-1]
            group.add_argument(name, **_flag_options(flag_info(config_field), metavar, default))


def _flag_options(info: FlagInfo, metavar: str, default: Any) -> dict[str, Any]:
    shown = f" (default: {default})" if isinstance(default, (str, int, float)) and default != "" else ""
    return {
        "action": "append" if info.repeatable else "store",
        "type": parse_with(info.parse),
        "choices": info.choices,
        "metavar": info.metavar or "|".join(info.choices or ()) or metavar,
        "default": argparse.SUPPRESS,
        "help": (info.help + shown).replace("%", "%%"),
    }


def parse_with(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse`, with its ValueError's own words in argparse's error."""

    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            kind = {int: "an integer", float: "a number"}.get(parse)  # type: ignore[call-overload]
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}" if kind else str(error)) from None

    return checked


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine flags that were given; `EngineConfig` has the defaults.

    Raises:
        ConfigError: a value is out of range.
    """
    return EngineConfig(**_given(args, EngineConfig))


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The server flags that were given; `ServerConfig` has the defaults.

    Raises:
        ConfigError: a value is out of range.
    """
    return ServerConfig(**_given(args, ServerConfig))


def _given(args: argparse.Namespace, config: type[EngineConfig] | type[ServerConfig]) -> dict[str, Any]:
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()}
    return {f.name: given[f.name] for f in fields(config) if f.name in given}
