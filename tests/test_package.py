"""Importing the package is cheap, and its two names are there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import miniserve

HEAVY = ("torch", "transformers", "numpy", "tokenizers", "gguf")


@pytest.mark.parametrize(
    "statement",
    [
        "import miniserve",
        "from miniserve import SamplingParams; SamplingParams(temperature=0)",
        "from miniserve.cli import main\ntry: main(['generate', '--help'])\nexcept SystemExit: pass",
        "from miniserve.cli import main; main(['generate', '-p', 'x', '--max-num-seqs', '0'])",
    ],
    ids=["import", "sampling", "help", "bad-flag"],
)
def test_no_heavy_imports(statement: str) -> None:
    """Bug: `--help` took seconds, for the import of torch."""
    check = f"{statement}\nimport sys\nsys.exit(sorted(sys.modules.keys() & {set(HEAVY)!r}) or 0)"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_names() -> None:
    from miniserve.engine.llm import LLM

    assert miniserve.LLM is LLM
    assert {"LLM", "SamplingParams"} <= set(miniserve.__all__)
    with pytest.raises(AttributeError, match="NoSuchThing"):
        _ = miniserve.NoSuchThing
