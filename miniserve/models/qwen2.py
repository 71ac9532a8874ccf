"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v."""

from __future__ import annotations

from miniserve.models.family import Family
from miniserve.models.fields import Fields


def upper_layers_window(fields: Fields, num_layers: int) -> int | None:
    """The window of Qwen's layers from `max_window_layers` on, where `use_sliding_window` is true."""
    if not fields.flag("use_sliding_window"):
        return None
    window = fields.optional_integer("sliding_window")
    layer_types = fields.texts("layer_types")
    if layer_types:
        return window if "sliding_attention" in layer_types else None
    # 0 is a legal value here (every layer slides), which Fields.integer would refuse.
    return window if fields.number("max_window_layers", 28) < num_layers else None


QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    gguf_architectures=("qwen2",),
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    qkv_bias=True,
    window=upper_layers_window,
)
