"""Which model families there are, and which of them serves an architecture."""

from __future__ import annotations

from collections.abc import Sequence

from miniserve.errors import UnsupportedModelError
from miniserve.models.family import Family
from miniserve.models.gemma import GEMMA2, GEMMA3
from miniserve.models.gpt_oss import GPT_OSS
from miniserve.models.granite import GRANITE
from miniserve.models.llama import LLAMA, MISTRAL
from miniserve.models.olmo import OLMO2, OLMO3
from miniserve.models.phi3 import PHI3
from miniserve.models.qwen2 import QWEN2
from miniserve.models.qwen3 import QWEN3
from miniserve.models.qwen3_moe import QWEN3_MOE
from miniserve.models.smollm3 import SMOLLM3

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, SMOLLM3, PHI3, OLMO2, OLMO3, GRANITE, QWEN3_MOE, GPT_OSS)


def find_family(architectures: Sequence[str]) -> Family:
    """The family of the first architecture of config.json's list that is supported.

    Raises:
        UnsupportedModelError: none is; the message lists those that are.
    """
    for architecture in architectures:
        for family in FAMILIES:
            if architecture in family.architectures:
                return family
    supported = [name for family in FAMILIES for name in family.architectures]
    raise _unsupported(", ".join(architectures), supported)


def find_gguf_family(architecture: str) -> Family:
    """The family of GGUF's `general.architecture`.

    Raises:
        UnsupportedModelError: there is none; the message lists those that are.
    """
    for family in FAMILIES:
        if architecture in family.gguf_architectures:
            return family
    supported = [name for family in FAMILIES for name in family.gguf_architectures]
    raise _unsupported(f"GGUF {architecture}", supported)


def _unsupported(architecture: str, supported: Sequence[str]) -> UnsupportedModelError:
    return UnsupportedModelError(f"architecture {architecture} is not supported; supported are {', '.join(supported)}")
