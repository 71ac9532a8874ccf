"""OLMo 2 and OLMo 3: norms behind attention and feed-forward instead of in front, and over the whole of q and of k.

OLMo 3 has layers that slide, whose RoPE is not scaled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from miniserve.models.config import ModelConfig, RopeConfig
from miniserve.models.family import GGUF_NAMES, HF_NAMES, Family
from miniserve.models.fields import Fields
from miniserve.models.hf_rope import parse_rope, ropes_by_layer_type
from miniserve.models.layer_types import (
    FULL,
    SLIDING,
    full_each,
    slides_but_each,
    windows_by_layer_type,
    with_local_rope,
)

_PERIOD = 4
_COMMON: dict[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279}


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    return windows_by_layer_type(fields, num_layers, fields.integer("sliding_window"), slides_but_each(_PERIOD))


def _describe(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, pre_norm=False, post_norm=True)


def _describe_olmo3(fields: Fields, config: ModelConfig) -> ModelConfig:
    if SLIDING in ropes_by_layer_type(fields):
        local = parse_rope(fields, config.max_position_embeddings, layer_type=SLIDING)
    else:
        local = RopeConfig(theta=parse_rope(fields, config.max_position_embeddings, layer_type=FULL).theta)
    return with_local_rope(_describe(fields, config), local)


def _describe_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    """A file with a window is an OLMo 3."""
    config = full_each(_describe(fields, config), fields.integer("attention.sliding_window_pattern", _PERIOD))
    return with_local_rope(config, RopeConfig(theta=fields.number("rope.freq_base", 10000.0)))


_PRE_NORMS = {"attn_branch.norm", "mlp_branch.norm"}
_HF = HF_NAMES.with_layer(
    {"attn_branch.post_norm": ("post_attention_layernorm",), "mlp_branch.post_norm": ("post_feedforward_layernorm",)},
    without=_PRE_NORMS,
)
_GGUF = GGUF_NAMES.with_layer(
    {"attn_branch.post_norm": ("post_attention_norm",), "mlp_branch.post_norm": ("post_ffw_norm",)}, without=_PRE_NORMS
)

OLMO2 = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    gguf_architectures=("olmo2",),
    defaults=_COMMON,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="projection",
    describe=_describe,
    describe_gguf=_describe_gguf,
    hf_names=_HF,
    gguf_names=_GGUF,
)

# As GGUF, OLMo 3 is an "olmo2".
OLMO3 = Family(
    name="olmo3",
    architectures=("Olmo3ForCausalLM",),
    defaults={**_COMMON, "rope_theta": 5e5, "sliding_window": 4096},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="projection",
    rope_layer_type=FULL,
    windows=_windows,
    describe=_describe_olmo3,
    hf_names=_HF,
)
