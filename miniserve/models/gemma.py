"""Gemma 2 and the text models of Gemma 3: four norms a layer, GeGLU, sliding and full attention in turn.

Norm weights are stored as what is added to one; GGUF files hold the sum. Gemma 2 caps scores and logits; Gemma 3 has
RMSNorm over heads instead, and a RoPE of its own for the layers that slide.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from miniserve.errors import CheckpointError, UnsupportedModelError
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

_COMMON: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
# The largest models of both divide scores by the root of hidden_size / num_heads; GGUF files do not say so.
_LARGEST_LAYERS = {"gemma2": 46, "gemma3": 62}
_LOCAL_THETA = 10000.0


def _gemma2_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    return windows_by_layer_type(fields, num_layers, fields.integer("sliding_window"), slides_but_each(2))


def _gemma3_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    period = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    return windows_by_layer_type(fields, num_layers, fields.integer("sliding_window"), slides_but_each(period))


def _gemma(config: ModelConfig) -> ModelConfig:
    return replace(config, post_norm=True, activation="gelu_tanh", embedding_scale=config.hidden_size**0.5)


def _with_soft_caps(fields: Fields, config: ModelConfig, attention: str, logits: str) -> ModelConfig:
    return replace(
        config,
        attention_soft_cap=fields.number(attention, 0.0),
        logit_soft_cap=fields.number(logits, 0.0),
    )


def _describe_gemma2(fields: Fields, config: ModelConfig) -> ModelConfig:
    scalar = fields.number("query_pre_attn_scalar")
    if scalar <= 0.0:
        raise CheckpointError(f"{fields.source}: query_pre_attn_scalar must be above 0, got {scalar:g}")
    config = replace(_gemma(config), attention_scale=scalar**-0.5)
    return _with_soft_caps(fields, config, "attn_logit_softcapping", "final_logit_softcapping")


def _describe_gemma3(fields: Fields, config: ModelConfig) -> ModelConfig:
    if fields.flag("use_bidirectional_attention"):
        raise UnsupportedModelError(f"{fields.source}: use_bidirectional_attention is not supported")
    if SLIDING in ropes_by_layer_type(fields):
        local = parse_rope(fields, config.max_position_embeddings, layer_type=SLIDING)
    else:
        local = RopeConfig(theta=fields.number("rope_local_base_freq", _LOCAL_THETA))
    # Its config.json may have a soft cap of scores, which the model does not.
    return with_local_rope(replace(_describe_gemma2(fields, config), attention_soft_cap=0.0), local)


def _describe_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    config = _gemma(config)
    if config.num_layers == _LARGEST_LAYERS[config.family]:
        config = replace(config, attention_scale=(config.hidden_size / config.num_heads) ** -0.5)
    return _with_soft_caps(fields, config, "attn_logit_softcapping", "final_logit_softcapping")


def _describe_gemma2_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    return full_each(_describe_gguf(fields, config), fields.integer("attention.sliding_window_pattern", 2))


def _describe_gemma3_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    config = replace(_describe_gguf(fields, config), attention_soft_cap=0.0)
    config = full_each(config, fields.integer("attention.sliding_window_pattern", 6))
    return with_local_rope(config, RopeConfig(theta=fields.number("rope.freq_base_swa", _LOCAL_THETA)))


_GGUF_KEYS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
_HF = HF_NAMES.with_layer(
    {
        "attn_branch.post_norm": ("post_attention_layernorm",),
        "mlp_branch.norm": ("pre_feedforward_layernorm",),
        "mlp_branch.post_norm": ("post_feedforward_layernorm",),
    }
)
_GGUF = GGUF_NAMES.with_layer(
    {"attn_branch.post_norm": ("post_attention_norm",), "mlp_branch.post_norm": ("post_ffw_norm",)}
)

GEMMA2 = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    gguf_architectures=("gemma2",),
    defaults={
        **_COMMON,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    windows=_gemma2_windows,
    describe=_describe_gemma2,
    gguf_keys=_GGUF_KEYS,
    describe_gguf=_describe_gemma2_gguf,
    hf_norm_offset=1.0,
    hf_names=_HF,
    gguf_names=_GGUF,
)

GEMMA3 = Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM",),
    gguf_architectures=("gemma3",),
    defaults={**_COMMON, "max_position_embeddings": 131072, "rope_theta": 1e6},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="heads",
    rope_layer_type=FULL,
    windows=_gemma3_windows,
    describe=_describe_gemma3,
    gguf_keys=_GGUF_KEYS,
    describe_gguf=_describe_gemma3_gguf,
    hf_norm_offset=1.0,
    hf_names=_HF,
    gguf_names=_GGUF,
)
