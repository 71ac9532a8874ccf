"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v."""

from __future__ import annotations

from miniserve.models.family import Family
from miniserve.models.fields import Fields
from miniserve.models.layer_types import no_windows, windows_by_layer_type


def upper_layers_slide(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Qwen's layers from `max_window_layers` on have a window, where `use_sliding_window` is true."""
    if not fields.flag("use_sliding_window"):
        return no_windows(fields, num_layers)
    # 0 is a legal value here (every layer slides), which Fields.integer would refuse.
    first = fields.number("max_window_layers", 28)
    window = fields.optional_integer("sliding_window")
    return windows_by_layer_type(fields, num_layers, window, lambda layer: layer >= first)


QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    gguf_architectures=("qwen2",),
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    qkv_bias=True,
    windows=upper_layers_slide,
)
