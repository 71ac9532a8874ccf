"""SECURITY.md: each promise names a test that is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ") and "`tests/" in line]
# What would run code that a checkpoint brings, or read pickles.
FORBIDDEN = re.compile(r"trust_remote_code\s*=\s*True|\btorch\.load\(|\bpickle\b|\bexec\(|\beval\(")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:50])
def test_each_promise_names_its_test(row: str) -> None:
    named = re.findall(r"`(tests/[^`]+)`", row)
    assert named
    for name in named:
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        assert not test or f"def {test}(" in (ROOT / path).read_text(), name


def test_there_are_promises() -> None:
    assert len(ROWS) >= 8


def test_no_code_of_a_checkpoint_is_run() -> None:
    """Nowhere in the package is there a way to."""
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in (ROOT / "miniserve").rglob("*.py")
        for match in FORBIDDEN.finditer(path.read_text())
    ]
    assert not found


def test_each_dependency_is_locked_with_its_hashes() -> None:
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    files = [
        file
        for package in packages
        if "editable" not in package["source"]
        for file in [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
    ]
    assert len(files) > len(packages) > 50
    assert all(file["hash"].startswith("sha256:") for file in files)
    assert all("registry" in package["source"] for package in packages if "editable" not in package["source"])
