"""The files of deploy/, parsed, and what stands in a query."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def read_yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def read_dashboard() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/miniserve.json").read_text())
    return dashboard


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bminiserve_\w+", expression))


def labels_in(expression: str) -> set[str]:
    """Those that it groups by or selects by."""
    groups = re.findall(r"\bby \(([^)]*)\)", expression)
    grouped = {label.strip() for group in groups for label in group.split(",")}
    return grouped | set(re.findall(r"(\w+)=~?\"", expression))
