"""The benchmarks of small weights run to their end on a tiny model; what they measure there means nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
