"""Qwen3-MoE: Qwen3 with a mixture of experts in (most of) its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from miniserve.models.config import ExpertsConfig, ModelConfig
from miniserve.models.family import GGUF_NAMES, HF_NAMES, Family
from miniserve.models.fields import Fields
from miniserve.models.layer_types import check_experts, no_windows, one_window

_DEFAULTS: dict[str, Any] = {
    "intermediate_size": 6144,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """All layers slide, or none: unlike Qwen3's, whatever `max_window_layers` says."""
    windows = one_window if fields.flag("use_sliding_window") else no_windows
    return windows(fields, num_layers)


def _describe(fields: Fields, config: ModelConfig) -> ModelConfig:
    dense = fields.integers("mlp_only_layers") or ()
    step = fields.integer("decoder_sparse_step", 1)
    layers = tuple(
        replace(layer, sparse=index not in dense and (index + 1) % step == 0)
        for index, layer in enumerate(config.layers)
    )
    experts = ExpertsConfig(
        num_experts=fields.integer("num_experts", fields.integer("num_local_experts", 128)),  # old and new spelling
        num_active=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalise=fields.flag("norm_topk_prob"),
    )
    check_experts(experts, fields.source)
    return replace(config, layers=layers, experts=experts)


def describe_gguf_experts(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Every layer of a GGUF file is sparse, and shares sum to one."""
    experts = ExpertsConfig(
        num_experts=fields.integer("expert_count"),
        num_active=fields.integer("expert_used_count"),
        intermediate_size=fields.integer("expert_feed_forward_length"),
        normalise=True,
    )
    check_experts(experts, fields.source)
    return replace(config, layers=tuple(replace(layer, sparse=True) for layer in config.layers), experts=experts)


GGUF_EXPERTS = {
    "mlp.router.scores": ("ffn_gate_inp",),
    "mlp.experts.*.gate_up": ("ffn_gate_exps.*", "ffn_up_exps.*"),
    "mlp.experts.*.down": ("ffn_down_exps.*",),
}

QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    gguf_architectures=("qwen3moe",),
    defaults=_DEFAULTS,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="heads",
    windows=_windows,
    describe=_describe,
    gguf_keys=frozenset({"expert_count"}),
    describe_gguf=describe_gguf_experts,
    hf_names=HF_NAMES.with_layer(
        {
            "mlp.router.scores": ("mlp.gate",),
            "mlp.experts.*.gate_up": ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"),
            "mlp.experts.*.down": ("mlp.experts.*.down_proj",),
        }
    ),
    gguf_names=GGUF_NAMES.with_layer(GGUF_EXPERTS),
)
