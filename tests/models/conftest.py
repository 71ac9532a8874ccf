"""Tiny checkpoints to read: a config.json's content, and a folder of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture
def tiny() -> dict[str, Any]:
    """A config.json with the fields that every checkpoint has."""
    return dict(TINY)


@pytest.fixture
def write_json(tmp_path: Path) -> Callable[[str, Any], Path]:
    """Write a JSON file into the test's folder."""

    def write(name: str, content: Any) -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(content))
        return path

    return write
