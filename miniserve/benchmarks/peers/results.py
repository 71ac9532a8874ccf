"""What the comparison gave, and its file. Does not know how anything was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from miniserve.benchmarks.peers.load import Figures, Workload
from miniserve.benchmarks.peers.probes import Speed
from miniserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Turn:
    """One arm in one round.

    Attributes:
        speed: of the machine, just before.
        start_seconds: until the server was ready; None for an arm without one.
        figures: by workload.
        errors: by workload; under "" the one that kept all of them from being measured.
    """

    model: str
    round: int
    arm: str
    speed: Speed
    start_seconds: float | None = None
    figures: Mapping[str, Figures] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that was measured.

    Attributes:
        versions: of the peers.
        left_out: model -> arm -> why it was not measured.
    """

    models: tuple[str, ...]
    arms: tuple[str, ...]
    workloads: tuple[Workload, ...]
    rounds: int
    cores: tuple[int, ...]
    versions: Mapping[str, str]
    left_out: Mapping[str, Mapping[str, str]]
    turns: tuple[Turn, ...] = ()


def write_comparison(path: Path, comparison: Comparison) -> None:
    """As JSON; never half of it."""
    text = json.dumps(asdict(comparison), indent=1, ensure_ascii=False) + "\n"
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def read_comparison(path: Path) -> Comparison:
    """What `write_comparison` wrote.

    Raises:
        ConfigError: the file is missing or is something else.
    """
    try:
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Comparison(
            **{
                **stored,
                **{name: tuple(stored[name]) for name in ("models", "arms", "cores")},
                "workloads": tuple(Workload(**workload) for workload in stored["workloads"]),
                "turns": tuple(_read_turn(turn) for turn in stored["turns"]),
            }
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result of the command run: {error}") from error


def _read_turn(stored: dict[str, Any]) -> Turn:
    figures = {name: Figures(**values) for name, values in stored["figures"].items()}
    return Turn(**{**stored, "speed": Speed(**stored["speed"]), "figures": figures})
