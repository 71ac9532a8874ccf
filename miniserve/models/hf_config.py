"""config.json (and generation_config.json) of a Hugging Face checkpoint -> `ModelConfig`.

Owns both spellings of each field and what is refused: whatever would change the answers and is not implemented.
Does not know where the files come from.
"""

from __future__ import annotations

from dataclasses import dataclass

from miniserve.errors import CheckpointError, UnsupportedModelError
from miniserve.layers.mlp import Activation
from miniserve.models.config import LayerConfig, ModelConfig, RopeConfig
from miniserve.models.family import Family
from miniserve.models.fields import Fields
from miniserve.models.hf_rope import check_longrope, parse_rope, rotary_dim
from miniserve.models.registry import find_family

_MOST_LAYERS = 1000
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


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
    _refuse_unsupported(fields, family.quant_methods)
    max_positions = fields.integer("max_position_embeddings")
    rope = parse_rope(fields, max_positions, layer_type=family.rope_layer_type)
    length, notes = usable_length(max_positions, rope)
    windows = family.windows(fields, fields.integer("num_hidden_layers"))
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", max(hidden_size // num_heads, 1))
    shared = ModelConfig(
        family=family.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rotary_dim=_rotary_dim(family, fields, head_dim),
        attention_scale=head_dim**-0.5,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=length,
        layers=tuple(LayerConfig(rope=rope, window=window) for window in windows),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=_switch(family.qkv_bias, fields),
        o_bias=_switch(family.o_bias, fields),
        mlp_bias=_switch(family.mlp_bias, fields),
        qk_norm=family.qk_norm,
        activation=_activation(fields),
        eos_token_ids=fields.token_ids("eos_token_id") | generation.token_ids("eos_token_id"),
    )
    parsed = family.describe(fields, shared)
    check_shapes(parsed, config.source)
    return ParsedConfig(family, parsed, notes)


def usable_length(max_positions: int, rope: RopeConfig) -> tuple[int, tuple[str, ...]]:
    """The longest sequence that is computed exactly, and notes on what limits it."""
    length = max_positions
    notes = []
    if rope.type == "yarn":
        assert rope.original_max_position_embeddings is not None
        length = max(length, int(rope.factor * rope.original_max_position_embeddings))
    if rope.type == "longrope" and rope.original_context < length:
        notes.append(f"LongRoPE: other factors where --max-model-len is above {rope.original_context} tokens")
    if rope.type == "dynamic":
        # Beyond it every step would change the frequencies of keys that are already in the cache.
        notes.append(f"dynamic RoPE scaling: limited to the original context of {length} tokens")
    return length, tuple(notes)


def check_shapes(config: ModelConfig, source: str) -> None:
    """Raise CheckpointError for shapes that do not make a transformer."""
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{source}: {config.num_heads} attention heads cannot share {config.num_kv_heads} KV heads"
        )
    if config.rotary_dim % 2:
        raise CheckpointError(f"{source}: RoPE turns pairs of dimensions, and a head has {config.rotary_dim} of them")
    for layer in config.layers:
        if layer.rope is not None and layer.rope.type == "longrope":
            check_longrope(layer.rope, config.rotary_dim, source)
    if not 0.0 < config.attention_scale < float("inf"):
        raise CheckpointError(
            f"{source}: the scale of attention scores must be above 0, got {config.attention_scale:g}"
        )
    if config.num_layers > _MOST_LAYERS:
        raise CheckpointError(f"{source}: {config.num_layers} layers are more than {_MOST_LAYERS}")
    if config.rms_norm_eps <= 0:
        raise CheckpointError(f"{source}: the RMSNorm epsilon must be above 0, got {config.rms_norm_eps}")


def _refuse_unsupported(fields: Fields, known_methods: frozenset[str]) -> None:
    for key in ("quantization_config", "compression_config"):
        section = fields.section(key)
        if section is not None:
            method = section.text("quant_method", "of an unnamed method")
            if method in known_methods:
                continue
            raise UnsupportedModelError(
                f"{fields.source}: quantized weights ({method}) are not supported; "
                "use the original checkpoint or a GGUF file"
            )


def _rotary_dim(family: Family, fields: Fields, head_dim: int) -> int:
    size = rotary_dim(fields, head_dim)
    if size != head_dim and not family.partial_rotary:
        raise UnsupportedModelError(f"{fields.source}: partial_rotary_factor is not supported for {family.name}")
    return size


def _activation(fields: Fields) -> Activation:
    name = fields.text("hidden_activation", fields.text("hidden_act", "silu"))
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{fields.source}: hidden_act {name} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _switch(value: bool | str, fields: Fields) -> bool:
    return value if isinstance(value, bool) else fields.flag(value)
