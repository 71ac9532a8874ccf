"""The benchmark of the way through HTTP runs to its end, and counts what it says it counts."""

from __future__ import annotations

import re
import sys

import pytest

from miniserve.benchmarks import http_overhead


def test_prints_a_line_an_arm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(http_overhead, "ARMS", {"one": 0.001})  # each arm starts a server
    monkeypatch.setattr(sys, "argv", ["http_overhead", "--streams", "2", "--tokens", "20", "--repeat", "1"])
    http_overhead.main()
    head, arm = capsys.readouterr().out.splitlines()
    assert head.startswith("2 streams of 20 chunks")
    [rate] = re.findall(r"one: (\d+) chunks/s", arm)
    assert int(rate) > 0
