"""Llama (also SmolLM2 and everything else that is saved as Llama) and Mistral, which differs in its defaults."""

from __future__ import annotations

from miniserve.models.family import Family
from miniserve.models.fields import Fields
from miniserve.models.layer_types import windows_by_layer_type


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """All slide, but where config.json says it layer by layer (Ministral)."""
    return windows_by_layer_type(fields, num_layers, fields.optional_integer("sliding_window"), lambda _layer: True)


LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    gguf_architectures=("llama",),
    defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    gguf_pairs_adjacent=True,
)

# As GGUF, Mistral is a "llama".
MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    windows=_windows,
)
