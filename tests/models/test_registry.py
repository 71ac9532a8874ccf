"""Which family serves an architecture."""

from __future__ import annotations

import pytest

from miniserve.errors import UnsupportedModelError
from miniserve.models.registry import FAMILIES, find_family, find_gguf_family


def test_the_first_supported_architecture_wins() -> None:
    assert find_family(["Unheard", "Qwen2ForCausalLM", "LlamaForCausalLM"]).name == "qwen2"


def test_an_architecture_has_one_family() -> None:
    names = [name for family in FAMILIES for name in family.architectures]
    gguf_names = [name for family in FAMILIES for name in family.gguf_architectures]
    assert len(set(names)) == len(names)
    assert len(set(gguf_names)) == len(gguf_names)


def test_the_refusal_lists_what_is_supported() -> None:
    with pytest.raises(UnsupportedModelError, match=r"GGUF rwkv7 is not supported; .* llama, qwen2, qwen3"):
        find_gguf_family("rwkv7")
