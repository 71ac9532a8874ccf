"""The benchmarks of small weights run to their end on a tiny model; what they measure there means nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miniserve.benchmarks import growth
from miniserve.benchmarks.quality import compare
from tests.support import tiny_model


@pytest.mark.parametrize(
    ("module", "options", "num_columns"),
    [("decode", ["--streams", "2", "--context", "40", "--rounds", "1"], 9), ("quality", [], 4)],
)
def test_prints_a_row_for_each_arm(tmp_path: Path, module: str, options: list[str], num_columns: int) -> None:
    tiny_model(tmp_path, "qwen3")
    command = [sys.executable, "-m", f"miniserve.benchmarks.{module}", "--model", str(tmp_path)]
    arms = ["--arms", "bf16", "int4+kv-int8"]
    result = subprocess.run([*command, *arms, *options], capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    rows = [line.strip("│ ").split("│") for line in result.stdout.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in rows] == ["bf16", "int4+kv-int8"]
    assert all(len(row) == num_columns for row in rows)


def test_divergence() -> None:
    exact = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]]).log()
    mean, largest, same = compare(exact, other)
    expected = 0.5 * torch.log(torch.tensor(2.0)) + 0.25 * torch.log(torch.tensor(0.5))
    assert largest == pytest.approx(float(expected))
    assert mean == pytest.approx(largest / 2)
    assert same == 0.5


def test_the_profile_of_a_step(tmp_path: Path) -> None:
    """Each part has a row, and together they are the step."""
    tiny_model(tmp_path, "llama")
    command = [sys.executable, "-m", "miniserve.benchmarks.step_profile", "--model", str(tmp_path)]
    options = ["--streams", "2", "--context", "40", "--rounds", "1"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    shares = {row[0]: float(row[2].rstrip("%")) for row in rows}
    assert len(shares) == 9 and shares.pop("whole step") == 100.0
    assert sum(shares.values()) == pytest.approx(100, abs=1)
    assert [row[0] for row in rows if row[5]] == ["embedding and layers", "head", "whole step"]


def test_the_growth_of_a_step(tmp_path: Path) -> None:
    """A row for each load, and a picture."""
    tiny_model(tmp_path, "llama")
    command = [sys.executable, "-m", "miniserve.benchmarks.growth", "--model", str(tmp_path), "--rounds", "1"]
    options = ["--contexts", "8", "40", "--streams", "1", "2", "--sizes", "--plot", str(tmp_path / "growth.png")]
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    rows = [line.split("│")[1].strip() for line in result.stdout.splitlines() if line.startswith("│")]
    assert rows == ["1 stream", "1 stream", "16 streams", "16 streams", "context 128", "context 128"]
    assert (tmp_path / "growth.png").read_bytes()[:4] == b"\x89PNG"


def test_the_shapes_of_growth_are_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "MANY", 2)
    curves = growth.over_size({"tiny": (64, 96, 2, 4, 2)}, "smollm2", rounds=1)
    assert {name: len(points) for name, points in curves.items()} == {"1 stream": 1, "2 streams": 1}
    [point] = curves["1 stream"]
    assert point.x == pytest.approx(
        2 * (49152 * 64 + 2 * (4 * 16 * 64 * 2 + 2 * 2 * 16 * 64 + 3 * 64 * 96)) / 1e6, rel=0.01
    )
