"""The benchmark runs to its end on a tiny model; what it measures there means nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import tiny_model


def test_prints_a_table_of_both_arms(tmp_path: Path) -> None:
    tiny_model(tmp_path, "qwen3")
    command = [sys.executable, "-m", "miniserve.benchmarks.versus_transformers", "--model", str(tmp_path)]
    options = ["--dtype", "float32", "--num-prompts", "2", "--max-tokens", "4", "--repeat", "1"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    rows = [line.split("│") for line in result.stdout.splitlines() if line.startswith("│")]
    assert [(row[1].strip(), row[2].strip()) for row in rows] == [
        ("2", "transformers"),
        ("2", "miniserve"),
        ("1", "transformers"),
        ("1", "miniserve"),
    ]
    assert all(float(row[3]) > 0 for row in rows)
