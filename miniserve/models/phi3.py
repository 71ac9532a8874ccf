"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with fused weights, LongRoPE, and heads that may turn in part only."""

from __future__ import annotations

from miniserve.errors import UnsupportedModelError
from miniserve.models.config import ModelConfig
from miniserve.models.family import GGUF_NAMES, HF_NAMES, Family
from miniserve.models.fields import Fields
from miniserve.models.layer_types import one_window


def _describe(fields: Fields, config: ModelConfig) -> ModelConfig:
    if any(layer.rope is not None and layer.rope.type == "yarn" for layer in config.layers):
        # What its first files call yarn is an early LongRoPE.
        raise UnsupportedModelError(f"{fields.source}: RoPE type yarn is not supported for phi3, only longrope")
    return config


PHI3 = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    gguf_architectures=("phi3",),
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
    },
    partial_rotary=True,
    gguf_keys=frozenset({"rope.scaling.attn_factor"}),
    windows=one_window,
    describe=_describe,
    hf_names=HF_NAMES.with_layer({"attn.qkv": ("self_attn.qkv_proj",), "mlp.gate_up": ("mlp.gate_up_proj",)}),
    gguf_names=GGUF_NAMES.with_layer({"attn.qkv": ("attn_qkv",), "mlp.gate_up": ("ffn_up",)}),
)
