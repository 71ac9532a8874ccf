"""The check for a GPU runs to its end without one, and a part that fails does not end it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts import gpu_check
from scripts.gpu_check import Bench, Row, check, show

ROOT = Path(__file__).parents[2]
# A usual torch image has none of these.
WITHOUT = """
import runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"llguidance", "prometheus_client", "platformdirs", "textual"}:
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
sys.argv = ["gpu_check.py", *sys.argv[1:]]
runpy.run_path("scripts/gpu_check.py", run_name="__main__")
"""
BENCH = Bench("cpu", [], (1,), {})


def test_the_small_check(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = [sys.executable, "-c", WITHOUT, "--small", "--out", str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(out.read_text())
    assert {row["part"] for row in rows} >= {
        "environment",
        "backends",
        "parity fp32",
        "graphs",
        "preemption",
        "throughput",
    }
    assert not any(row["failed"] for row in rows)
    assert all(f"{row['case']}" in ended.stdout for row in rows)
    assert sum("tokens/s" in row["outcome"] for row in rows) == 2


def test_a_part_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(_bench: Bench) -> list[Row]:
        raise RuntimeError("out of memory")

    def works(_bench: Bench) -> list[Row]:
        return [Row("works", "one", "ok")]

    monkeypatch.setattr(gpu_check, "PARTS", (breaks, works))
    rows = check(BENCH)
    assert rows == [
        Row("breaks", "the whole part", "RuntimeError: out of memory", failed=True),
        Row("works", "one", "ok"),
    ]
    show(rows)
    assert "out of memory  FAILED" in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "check", lambda _bench: rows)
    assert gpu_check.main(["--small"]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the check would run")
def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert "--small" in capsys.readouterr().err
