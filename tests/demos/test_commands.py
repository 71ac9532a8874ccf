from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miniserve.cli import main

MAIN = Path(__file__).parents[2] / "main.py"


@pytest.mark.parametrize(("command", "last_words"), [("kv-demo", "computing."), ("attn-demo", "weights.")])
def test_a_demo_runs_to_its_end_with_stdin_closed(command: str, last_words: str) -> None:
    """Also where the output can only take ASCII: what we draw must not be more than it can hold."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" "$1" {command} <&-', sys.executable, MAIN],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip().endswith(last_words)
    assert "\x1b" not in done.stdout and done.stdout.isascii()


@pytest.mark.parametrize("command", ["kv-demo", "attn-demo"])
def test_without_a_checkout_a_demo_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """The installed package has no demos: the command ended in a traceback."""
    monkeypatch.delitem(sys.modules, f"demos.{command.replace('-', '_')}", raising=False)
    monkeypatch.setitem(sys.modules, "demos", None)
    assert main([command]) == 2
    assert capsys.readouterr().err == (
        "miniserve: error: the demos are not part of the installed package; run main.py in a checkout\n"
    )
