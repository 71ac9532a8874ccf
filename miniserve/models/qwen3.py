"""Qwen3 (dense): Llama with RMSNorm over each head of q and k, and a head size of its own."""

from __future__ import annotations

from miniserve.models.family import Family
from miniserve.models.qwen2 import QWEN2, upper_layers_slide

QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    gguf_architectures=("qwen3",),
    defaults={**QWEN2.defaults, "head_dim": 128},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="heads",
    windows=upper_layers_slide,
)
