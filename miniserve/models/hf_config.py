"""config.json (and generation_config.json) of a Hugging Face checkpoint -> `ModelConfig`.

Owns both spellings of each field and what is refused: whatever would change the answers and is not implemented.
Does not know where the files come from.
"""

from __future__ import annotations

from dataclasses import dataclass

from miniserve.errors import CheckpointError, UnsupportedModelError
from miniserve.layers.rotary import ROPE_TYPES
from miniserve.models.config import ModelConfig, RopeConfig
from miniserve.models.family import Family
from miniserve.models.fields import Fields
from miniserve.models.registry import find_family

_ROPE_FIELDS = frozenset(RopeConfig.__dataclass_fields__) - {"theta"}
_ROPE_KEYS = _ROPE_FIELDS | {"rope_type", "rope_theta", "partial_rotary_factor", "finetuned"}
_ROPE_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True)
class ParsedConfig:
    """A family, its configuration, and what the user should know about it."""

    family: Family
    config: ModelConfig
    notes: tuple[str, ...] = ()


def parse_config(config: Fields, generation: Fields) -> ParsedConfig:
    """Read config.json; `generation` (generation_config.json, may be empty) adds end-of-sequence tokens.

    Raises:
        CheckpointError: a field is missing or does not make sense.
        UnsupportedModelError: the model needs something that is not implemented; the message names it.
    """
    architectures = config.texts("architectures")
    if not architectures:
        raise CheckpointError(f"{config.source}: architectures is missing")
    family = find_family(architectures)
    fields = Fields(config.source, {**family.defaults, **config.values})
    _refuse_unsupported(fields)
    max_positions = fields.integer("max_position_embeddings")
    num_layers = fields.integer("num_hidden_layers")
    rope = parse_rope(fields, max_positions)
    length, notes = usable_length(max_positions, rope, family.window(fields, num_layers))
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    parsed = ModelConfig(
        family=family.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", max(hidden_size // num_heads, 1)),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=length,
        rope=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=_switch(family.qkv_bias, fields),
        o_bias=_switch(family.o_bias, fields),
        mlp_bias=_switch(family.mlp_bias, fields),
        qk_norm=family.qk_norm,
        eos_token_ids=fields.token_ids("eos_token_id") | generation.token_ids("eos_token_id"),
    )
    check_shapes(parsed, config.source)
    return ParsedConfig(family, parsed, notes)


def parse_rope(fields: Fields, max_positions: int) -> RopeConfig:
    """Read rope_theta and rope_scaling, or transformers 5's rope_parameters, which holds both."""
    section, rope_type = _rope_section(fields)
    for key in _ROPE_REQUIRED.get(rope_type, ()):
        section.number(key)
    rope = RopeConfig(
        type=rope_type,
        theta=section.number("rope_theta", fields.number("rope_theta", 10000.0)),
        factor=section.number("factor", 1.0),
        original_max_position_embeddings=section.integer(
            "original_max_position_embeddings",
            fields.integer("original_max_position_embeddings", max_positions),
        ),
        low_freq_factor=section.number("low_freq_factor", 1.0),
        high_freq_factor=section.number("high_freq_factor", 4.0),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        attention_factor=section.optional_number("attention_factor"),
        mscale=section.optional_number("mscale"),
        mscale_all_dim=section.optional_number("mscale_all_dim"),
        truncate=section.flag("truncate", True),
    )
    check_rope(rope, section.source)
    return rope


def _rope_section(fields: Fields) -> tuple[Fields, str]:
    """The object that holds the RoPE parameters, and the RoPE type; refuses what it must not ignore."""
    section = (
        fields.section("rope_scaling")
        or fields.section("rope_parameters")
        or Fields(f"{fields.source}: rope_parameters", {})
    )
    nested = sorted(key for key, value in section.values.items() if isinstance(value, dict))
    if nested:
        raise UnsupportedModelError(f"{section.source}: one RoPE per layer type ({', '.join(nested)})")
    rope_type = section.text("rope_type", section.text("type", "default"))
    check_rope_type(rope_type, section.source)
    unknown = section.unknown(_ROPE_KEYS)
    if unknown:
        raise UnsupportedModelError(f"{section.source}: RoPE parameter {unknown[0]} is not supported")
    rotated = section.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise UnsupportedModelError(f"{section.source}: partial_rotary_factor {rotated:g} is not supported")
    return section, rope_type


def check_rope_type(rope_type: str, source: str) -> None:
    """Raise UnsupportedModelError for a RoPE type that is not implemented."""
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{source}: RoPE type {rope_type} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )


def check_rope(rope: RopeConfig, source: str) -> None:
    """Raise CheckpointError for parameters that no frequency can be computed from."""
    if rope.theta <= 1.0:
        raise CheckpointError(f"{source}: rope_theta must be above 1, got {rope.theta:g}")
    if rope.factor <= 0.0:
        raise CheckpointError(f"{source}: factor must be above 0, got {rope.factor:g}")
    if rope.type == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise CheckpointError(
            f"{source}: high_freq_factor {rope.high_freq_factor:g} must be above "
            f"low_freq_factor {rope.low_freq_factor:g}"
        )


def usable_length(max_positions: int, rope: RopeConfig, window: int | None) -> tuple[int, tuple[str, ...]]:
    """The longest sequence that is computed exactly, and notes on what limits it."""
    length = max_positions
    notes = []
    if rope.type == "yarn":
        assert rope.original_max_position_embeddings is not None
        length = max(length, int(rope.factor * rope.original_max_position_embeddings))
    if rope.type == "dynamic":
        # Beyond it every step would change the frequencies of keys that are already in the cache.
        notes.append(f"dynamic RoPE scaling: limited to the original context of {length} tokens")
    if window is not None and window < length:
        # Within the window, sliding and full attention see the same keys.
        notes.append(f"sliding-window attention: limited to the window of {window} tokens")
        length = window
    return length, tuple(notes)


def check_shapes(config: ModelConfig, source: str) -> None:
    """Raise CheckpointError for shapes that do not make a transformer."""
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{source}: {config.num_heads} attention heads cannot share {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{source}: head size must be even for RoPE, got {config.head_dim}")
    if config.rms_norm_eps <= 0:
        raise CheckpointError(f"{source}: the RMSNorm epsilon must be above 0, got {config.rms_norm_eps}")


def _refuse_unsupported(fields: Fields) -> None:
    for key in ("quantization_config", "compression_config"):
        section = fields.section(key)
        if section is not None:
            method = section.text("quant_method", "of an unnamed method")
            raise UnsupportedModelError(
                f"{fields.source}: quantized weights ({method}) are not supported; "
                "use the original checkpoint or a GGUF file"
            )
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"{fields.source}: hidden_act {activation} is not supported, only silu")


def _switch(value: bool | str, fields: Fields) -> bool:
    return value if isinstance(value, bool) else fields.flag(value)
