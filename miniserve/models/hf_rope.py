"""RoPE as config.json spells it: `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`, with both.

Owns what is refused: a type or a parameter that is not implemented never runs as if it were not there.
"""

from __future__ import annotations

from miniserve.errors import CheckpointError, UnsupportedModelError
from miniserve.layers.rotary import ROPE_NAMES, RopeConfig
from miniserve.models.fields import Fields

_ROPE_FIELDS = frozenset(RopeConfig.__dataclass_fields__) - {"theta"}
_OLD_NAMES = {"su": "longrope"}
_ROPE_KEYS = _ROPE_FIELDS | {"rope_type", "rope_theta", "partial_rotary_factor", "finetuned"}
_ROPE_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": (),
}


def parse_rope(fields: Fields, max_positions: int, *, layer_type: str | None = None) -> RopeConfig:
    """Read rope_theta and rope_scaling, or transformers 5's rope_parameters, which holds both.

    Args:
        fields: of config.json.
        max_positions: the longest sequence.
        layer_type: whose RoPE it is, in a family where layers of one type may have another than those of the other.
    """
    section, rope_type = _rope_section(fields, layer_type)
    for key in _ROPE_REQUIRED.get(rope_type, ()):
        section.number(key)
    rope = RopeConfig(
        type=rope_type,
        theta=section.number("rope_theta", fields.number("rope_theta", 10000.0)),
        factor=_factor(section, fields, rope_type, max_positions),
        original_max_position_embeddings=_original(section, fields, max_positions),
        low_freq_factor=section.number("low_freq_factor", 1.0),
        high_freq_factor=section.number("high_freq_factor", 4.0),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        attention_factor=section.optional_number("attention_factor"),
        mscale=section.optional_number("mscale"),
        mscale_all_dim=section.optional_number("mscale_all_dim"),
        truncate=section.flag("truncate", True),
        short_factor=section.numbers("short_factor"),
        long_factor=section.numbers("long_factor"),
    )
    check_rope(rope, section.source)
    return rope


def rotary_dim(fields: Fields, head_dim: int) -> int:
    """How many dimensions of a head RoPE turns."""
    section = _all_parameters(fields)
    rotated = section.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if not 0.0 < rotated <= 1.0:
        raise CheckpointError(f"{section.source}: partial_rotary_factor must be above 0 and at most 1, got {rotated:g}")
    return int(head_dim * rotated)


def ropes_by_layer_type(fields: Fields) -> list[str]:
    """The layer types that config.json has a RoPE for, where not all layers have the same."""
    return sorted(key for key, value in _all_parameters(fields).values.items() if isinstance(value, dict))


def _all_parameters(fields: Fields) -> Fields:
    return (
        fields.section("rope_scaling")
        or fields.section("rope_parameters")
        or Fields(f"{fields.source}: rope_parameters", {})
    )


def _factor(section: Fields, fields: Fields, rope_type: str, max_positions: int) -> float:
    """The scaling's; that of longrope is, where it is left out, how much longer the context has become."""
    default = max_positions / _original(section, fields, max_positions) if rope_type == "longrope" else 1.0
    return section.number("factor", default)


def _original(section: Fields, fields: Fields, max_positions: int) -> int:
    """The context before scaling. What config.json itself says of it comes before what its section says."""
    own = fields.optional_integer("original_max_position_embeddings")
    return own or section.integer("original_max_position_embeddings", max_positions)


def _rope_section(fields: Fields, layer_type: str | None) -> tuple[Fields, str]:
    """The object that holds the RoPE parameters, and the RoPE type; refuses what it must not ignore."""
    section = _all_parameters(fields)
    nested = ropes_by_layer_type(fields)
    if layer_type in nested:
        section = section.section(layer_type) or section
    elif layer_type is not None and section.source.endswith("rope_parameters") and section.values:
        raise UnsupportedModelError(f"{section.source}: one RoPE for all layers, where there must be one for each type")
    elif nested:
        raise UnsupportedModelError(f"{section.source}: one RoPE per layer type ({', '.join(nested)})")
    rope_type = section.text("rope_type", section.text("type", "default"))
    rope_type = _OLD_NAMES.get(rope_type, rope_type)
    check_rope_type(rope_type, section.source)
    unknown = section.unknown(_ROPE_KEYS)
    if unknown:
        raise UnsupportedModelError(f"{section.source}: RoPE parameter {unknown[0]} is not supported")
    return section, rope_type


def check_rope_type(rope_type: str, source: str) -> None:
    """Raise UnsupportedModelError for a RoPE type that is not implemented."""
    if rope_type not in ROPE_NAMES:
        raise UnsupportedModelError(
            f"{source}: RoPE type {rope_type} is not supported; supported are {', '.join(ROPE_NAMES)}"
        )


def check_rope(rope: RopeConfig, source: str) -> None:
    """Raise CheckpointError for parameters that no frequency can be computed from."""
    if rope.theta <= 1.0:
        raise CheckpointError(f"{source}: rope_theta must be above 1, got {rope.theta:g}")
    if rope.factor <= 0.0:
        raise CheckpointError(f"{source}: factor must be above 0, got {rope.factor:g}")
    if rope.type == "yarn" and min(rope.beta_fast, rope.beta_slow) <= 0.0:
        raise CheckpointError(f"{source}: beta_fast and beta_slow must be above 0")
    if rope.type == "longrope" and rope.original_context < 2:
        raise CheckpointError(f"{source}: original_max_position_embeddings must be above 1")
    if rope.type == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise CheckpointError(
            f"{source}: high_freq_factor {rope.high_freq_factor:g} must be above "
            f"low_freq_factor {rope.low_freq_factor:g}"
        )


def check_longrope(rope: RopeConfig, rotary_dim: int, source: str) -> None:
    """Raise CheckpointError unless there is a factor for each pair of dimensions."""
    for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if len(factors) != rotary_dim // 2 or min(factors) <= 0.0:
            shown = ", ".join(f"{factor:g}" for factor in factors[:8])
            raise CheckpointError(f"{source}: {name} must be {rotary_dim // 2} numbers above 0, got [{shown}]")
