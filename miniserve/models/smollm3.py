"""SmolLM3: Llama, but that some layers know no positions (NoPE, Kazemnejad et al., 2023)."""

from __future__ import annotations

from dataclasses import replace

from miniserve.errors import CheckpointError
from miniserve.models.config import ModelConfig
from miniserve.models.family import Family
from miniserve.models.fields import Fields
from miniserve.models.layer_types import SLIDING, no_windows, slides_but_each, windows_by_layer_type

_INTERVAL = 4  # GGUF files do not say it


def _turns(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Whether RoPE turns the queries and keys of each layer."""
    listed = fields.integers("no_rope_layers")  # 1 where it does, whatever the name says
    if listed is None:
        return _all_but_each(fields.integer("no_rope_layer_interval", _INTERVAL), num_layers)
    if len(listed) != num_layers:
        raise CheckpointError(f"{fields.source}: no_rope_layers has {len(listed)} entries for {num_layers} layers")
    return tuple(map(bool, listed))


def _all_but_each(interval: int, num_layers: int) -> tuple[bool, ...]:
    return tuple(map(slides_but_each(interval), range(num_layers)))


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    if not fields.flag("use_sliding_window"):
        if SLIDING in fields.texts("layer_types"):
            raise CheckpointError(f"{fields.source}: layer_types has {SLIDING}, but use_sliding_window is false")
        return no_windows(fields, num_layers)
    turns = _turns(fields, num_layers)
    window = fields.optional_integer("sliding_window")
    return windows_by_layer_type(fields, num_layers, window, lambda layer: not turns[layer])


def _with_nope(config: ModelConfig, turns: tuple[bool, ...]) -> ModelConfig:
    pairs = zip(config.layers, turns, strict=True)
    return replace(config, layers=tuple(layer if turn else replace(layer, rope=None) for layer, turn in pairs))


def _describe(fields: Fields, config: ModelConfig) -> ModelConfig:
    return _with_nope(config, _turns(fields, config.num_layers))


def _describe_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    return _with_nope(config, _all_but_each(_INTERVAL, config.num_layers))


SMOLLM3 = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    gguf_architectures=("smollm3",),
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "eos_token_id": 128001,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    windows=_windows,
    describe=_describe,
    describe_gguf=_describe_gguf,
    gguf_pairs_adjacent=True,
)
