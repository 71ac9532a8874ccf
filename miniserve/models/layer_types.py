"""Families whose layers are not all alike: which of them slide, and what those that do have of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from miniserve.errors import CheckpointError, UnsupportedModelError
from miniserve.models.config import ExpertsConfig, ModelConfig, RopeConfig
from miniserve.models.fields import Fields

SLIDING, FULL = "sliding_attention", "full_attention"  # in config.json's layer_types


def no_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """A family without sliding-window attention."""
    return (None,) * num_layers


def windows_by_layer_type(
    fields: Fields, num_layers: int, window: int | None, slides: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """The window of each layer: those slide that config.json's `layer_types` names so, or without it, that `slides`.

    Raises:
        CheckpointError: there is not one type for each layer.
        UnsupportedModelError: a layer is of another type.
    """
    types = fields.texts("layer_types")
    if not types:
        return tuple(window if slides(layer) else None for layer in range(num_layers))
    if len(types) != num_layers:
        raise CheckpointError(f"{fields.source}: layer_types has {len(types)} entries for {num_layers} layers")
    for layer_type in types:
        if layer_type not in (SLIDING, FULL):
            raise UnsupportedModelError(f"{fields.source}: layers of type {layer_type} are not supported")
    return tuple(window if layer_type == SLIDING else None for layer_type in types)


def one_window(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """A family whose layers all slide, where config.json has a `sliding_window`."""
    return (fields.optional_integer("sliding_window"),) * num_layers


def slides_but_each(period: int) -> Callable[[int], bool]:
    """Every layer slides but each `period`th."""
    return lambda layer: bool((layer + 1) % period)


def full_each(config: ModelConfig, period: int) -> ModelConfig:
    """No window in each `period`th layer."""
    slides = slides_but_each(period)
    layers = (layer if slides(index) else replace(layer, window=None) for index, layer in enumerate(config.layers))
    return replace(config, layers=tuple(layers))


def with_local_rope(config: ModelConfig, rope: RopeConfig) -> ModelConfig:
    """Layers that slide turn by a RoPE of their own."""
    layers = (layer if layer.window is None else replace(layer, rope=rope) for layer in config.layers)
    return replace(config, layers=tuple(layers))


def check_experts(experts: ExpertsConfig, source: str) -> None:
    """Raise CheckpointError if a token is to pass through more experts than there are."""
    if experts.num_active > experts.num_experts:
        raise CheckpointError(
            f"{source}: a token cannot pass through {experts.num_active} of {experts.num_experts} experts"
        )
