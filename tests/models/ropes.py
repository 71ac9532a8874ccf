"""The RoPE of a model whose layers all have the same."""

from __future__ import annotations

from miniserve.models.config import ModelConfig, RopeConfig


def only_rope(config: ModelConfig) -> RopeConfig:
    [rope] = {layer.rope for layer in config.layers}
    assert rope is not None
    return rope
