"""Granite 3 (dense): Llama with a factor of its own on embedding, scores, residual stream and logits."""

from __future__ import annotations

from dataclasses import replace

from miniserve.errors import CheckpointError
from miniserve.models.config import ModelConfig
from miniserve.models.family import Family
from miniserve.models.fields import Fields


def _describe(fields: Fields, config: ModelConfig) -> ModelConfig:
    return _scaled(
        fields,
        config,
        attention=fields.number("attention_multiplier", 1.0),
        embedding=fields.number("embedding_multiplier", 1.0),
        residual=fields.number("residual_multiplier", 1.0),
        logits=fields.number("logits_scaling", 1.0),
    )


def _describe_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    return _scaled(
        fields,
        config,
        attention=fields.number("attention.scale", config.attention_scale),
        embedding=fields.number("embedding_scale", 1.0),
        residual=fields.number("residual_scale", 1.0),
        logits=fields.number("logit_scale", 1.0),
    )


def _scaled(
    fields: Fields, config: ModelConfig, *, attention: float, embedding: float, residual: float, logits: float
) -> ModelConfig:
    """With these factors; logits are divided by theirs."""
    if logits == 0.0:
        raise CheckpointError(f"{fields.source}: logits cannot be divided by a scale of 0")
    return replace(
        config,
        attention_scale=attention,
        embedding_scale=embedding,
        residual_scale=residual,
        logit_scale=1.0 / logits,
    )


GRANITE = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    gguf_architectures=("granite",),
    defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    describe=_describe,
    gguf_keys=frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
    describe_gguf=_describe_gguf,
    gguf_pairs_adjacent=True,
)
