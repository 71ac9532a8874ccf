"""The benchmark of the way through HTTP runs to its end, and counts what it says it counts."""

from __future__ import annotations

import re
import subprocess
import sys


def test_prints_both_arms() -> None:
    command = [sys.executable, "-m", "miniserve.benchmarks.http_overhead"]
    result = subprocess.run(
        [*command, "--streams", "2", "--tokens", "20", "--repeat", "1"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    head, *arms = result.stdout.splitlines()
    assert head.startswith("2 streams of 20 chunks")
    assert len(arms) == 2 and all(int(re.findall(r": (\d+) chunks/s", arm)[0]) > 0 for arm in arms)
