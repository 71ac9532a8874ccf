"""What a model family declares, and the tensor names that most families share.

A family is data: which architectures it serves, what its config.json fields mean when they are left out, and how
its tensors are called. Reading config files and tensors is not done here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from miniserve.layers.attention import QKNorm
from miniserve.models.config import ModelConfig
from miniserve.models.fields import Fields
from miniserve.models.layer_types import no_windows
from miniserve.models.stored import StoredTensor

Describe = Callable[[Fields, ModelConfig], ModelConfig]


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How one file format calls the tensors that fill the transformer's parameters.

    Attributes:
        layer_prefix: what stands before the layer's number.
        layer: module of a layer -> the file's modules that fill it, in the order of their rows; * stands for an
            expert's number.
        top: the same for modules outside of the layers.
        ignored: endings of tensor names that carry nothing the transformer needs.
    """

    layer_prefix: str
    layer: Mapping[str, tuple[str, ...]]
    top: Mapping[str, tuple[str, ...]]
    ignored: tuple[str, ...] = ()

    def with_layer(self, layer: Mapping[str, tuple[str, ...]], without: Collection[str] = ()) -> TensorNames:
        """The same with other names for some modules of a layer, and not those that the family does not have."""
        kept = {module: sources for module, sources in self.layer.items() if module not in without}
        return replace(self, layer={**kept, **layer})

    def sources(self, parameter: str) -> tuple[str, ...]:
        """The tensors that fill a parameter ("layers.0.attn.qkv.weight"), in the order of their rows."""
        module, _, kind = parameter.rpartition(".")
        if module in self.top:
            return tuple(f"{source}.{kind}" for source in self.top[module])
        _, index, module = module.split(".", 2)
        number = re.search(r"(?<=\.experts\.)\d+", module)
        expert = "" if number is None else number[0]
        sources = self.layer[module if number is None else module.replace(f".{expert}.", ".*.")]
        return tuple(f"{self.layer_prefix}{index}.{source.replace('*', expert)}.{kind}" for source in sources)


HF_NAMES = TensorNames(
    layer_prefix="model.layers.",
    layer={
        "attn_branch.norm": ("input_layernorm",),
        "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.q_norm": ("self_attn.q_norm",),
        "attn.k_norm": ("self_attn.k_norm",),
        "attn.o": ("self_attn.o_proj",),
        "mlp_branch.norm": ("post_attention_layernorm",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    },
    top={"embed": ("model.embed_tokens",), "norm": ("model.norm",), "head": ("lm_head",)},
    ignored=(".rotary_emb.inv_freq",),  # older checkpoints store what rope_theta already says
)

GGUF_NAMES = TensorNames(
    layer_prefix="blk.",
    layer={
        "attn_branch.norm": ("attn_norm",),
        "attn.qkv": ("attn_q", "attn_k", "attn_v"),
        "attn.q_norm": ("attn_q_norm",),
        "attn.k_norm": ("attn_k_norm",),
        "attn.o": ("attn_output",),
        "mlp_branch.norm": ("ffn_norm",),
        "mlp.gate_up": ("ffn_gate", "ffn_up"),
        "mlp.down": ("ffn_down",),
    },
    top={"embed": ("token_embd",), "norm": ("output_norm",), "head": ("output",)},
    # Read as a part of the configuration.
    ignored=("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"),
)


def as_it_is(fields: Fields, config: ModelConfig) -> ModelConfig:
    """A family whose files say what is said for all families alike."""
    return config


def as_they_are(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """A family whose tensors are each one of a module."""
    return stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family.

    Attributes:
        architectures: the names in config.json's `architectures` that it serves.
        gguf_architectures: the same for GGUF's `general.architecture`.
        defaults: config.json fields whose absence does not mean the common default. A null overrides them.
        qkv_bias, o_bias, mlp_bias: fixed, or the config.json field that switches the bias on.
        qk_norm: as in `ModelConfig`.
        partial_rotary: config.json may turn only a part of a head.
        rope_layer_type: the layer type whose RoPE is the main one, where config.json may have one for each.
        windows: the sliding window of each layer, from config.json's fields and the number of layers.
        describe: adds to the configuration what only this family's config.json says; the fields are with its defaults.
        gguf_keys: GGUF fields that only this family has, which `describe_gguf` reads.
        describe_gguf: as `describe`, for a GGUF file's fields; windows are those that the file gives, in all layers.
        quant_methods: of a quantization_config in config.json, those whose tensors `unstack` understands.
        unstack: from the tensors in the safetensors files to those that `hf_names` tells of.
        hf_norm_offset: what is added to the norms' weights in safetensors.
        hf_names, gguf_names: how the two file formats call the tensors.
        gguf_pairs_adjacent: GGUF files hold the rows of q and k so that a RoPE pair lies side by side.
    """

    name: str
    architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: QKNorm = "none"
    partial_rotary: bool = False
    rope_layer_type: str | None = None
    windows: Callable[[Fields, int], tuple[int | None, ...]] = no_windows
    describe: Describe = as_it_is
    gguf_keys: frozenset[str] = frozenset()
    describe_gguf: Describe = as_it_is
    quant_methods: frozenset[str] = frozenset()
    unstack: Callable[[dict[str, StoredTensor]], dict[str, StoredTensor]] = as_they_are
    hf_norm_offset: float = 0.0
    hf_names: TensorNames = HF_NAMES
    gguf_names: TensorNames = GGUF_NAMES
    gguf_pairs_adjacent: bool = False


def row_sizes(parameter: str, num_rows: int, config: ModelConfig) -> list[int]:
    """How many of its rows each source of a fused parameter fills, in the order of `TensorNames`."""
    if ".attn.qkv." in parameter:
        return [config.q_size, config.kv_size, config.kv_size]
    assert ".gate_up." in parameter, f"{parameter} is not fused"
    return [num_rows // 2, num_rows // 2]
