"""The metadata of a GGUF file -> `ModelConfig`.

Owns llama.cpp's names for what config.json says, and what is refused. Does not know how the bytes are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from miniserve.errors import CheckpointError, UnsupportedModelError
from miniserve.layers.rotary import rope_frequencies
from miniserve.models.config import LayerConfig, ModelConfig, RopeConfig
from miniserve.models.family import Family
from miniserve.models.fields import Fields
from miniserve.models.gguf import GGUFFile, SkippedArray
from miniserve.models.hf_config import ParsedConfig, check_shapes, usable_length
from miniserve.models.hf_rope import check_rope, check_rope_type
from miniserve.models.registry import find_gguf_family

# Fields that change the answers and are not implemented, with the one value that leaves them alone.
_NEUTRAL: dict[str, object] = {
    "expert_count": 0,
    "attention.causal": True,
    "attention.scale": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.clamp_kqv": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "rope.scale_linear": 1.0,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
_ROPE_TYPES = {"none": "default", "linear": "linear", "yarn": "yarn"}
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
_LLAMA3_FACTORS = "rope_freqs.weight"
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
_ROPE_FACTORS = (_LLAMA3_FACTORS, _SHORT_FACTORS, _LONG_FACTORS)
# Every Llama 3.1, 3.2 and 3.3 has these; only the factor differs.
_LLAMA3_ORIGINAL_CONTEXT = 8192


def parse_gguf_config(file: GGUFFile) -> ParsedConfig:
    """Read the metadata of an open file.

    Raises:
        CheckpointError: a field is missing or does not make sense.
        UnsupportedModelError: the model needs something that is not implemented; the message names it.
    """
    metadata = Fields(str(file.path), file.metadata)
    architecture = metadata.text("general.architecture")
    if metadata.values.get("split.count", 1) not in (0, 1):
        raise UnsupportedModelError(
            f"{file.path}: a part of a split GGUF file; merge the parts with llama-gguf-split first"
        )
    family = find_gguf_family(architecture)
    fields = _architecture_fields(metadata, architecture)
    _refuse_unsupported(fields, family.gguf_keys)
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    head_dim, rotary_dim = _head_dims(fields, family, hidden_size // num_heads)
    max_positions = fields.integer("context_length")
    rope = _rope(file, fields, rotary_dim, max_positions)
    length, notes = usable_length(max_positions, rope)
    layer = LayerConfig(rope=rope, window=_window(fields))
    names = {tensor.name for tensor in file.tensors}
    shared = ModelConfig(
        family=family.name,
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        attention_scale=head_dim**-0.5,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=length,
        layers=(layer,) * fields.integer("block_count"),
        tie_word_embeddings="output.weight" not in names,
        qkv_bias=_has_bias(family, names, "attn.qkv"),
        o_bias=_has_bias(family, names, "attn.o"),
        mlp_bias=_has_bias(family, names, "mlp.gate_up"),
        qk_norm=family.qk_norm,
        eos_token_ids=frozenset().union(*(metadata.token_ids(f"tokenizer.ggml.{key}") for key in _END_TOKENS)),
    )
    config = family.describe_gguf(fields, shared)
    check_shapes(config, metadata.source)
    return ParsedConfig(family, config, notes)


def _architecture_fields(metadata: Fields, architecture: str) -> Fields:
    prefix = f"{architecture}."
    return Fields(
        f"{metadata.source}: {architecture}",
        {
            key.removeprefix(prefix): _same_in_all_layers(key, value, metadata.source)
            for key, value in metadata.values.items()
            if key.startswith(prefix)
        },
    )


def _same_in_all_layers(key: str, value: Any, source: str) -> Any:
    """A value per layer is supported as long as the layers agree."""
    if isinstance(value, SkippedArray) or (isinstance(value, list) and len(set(value)) != 1):
        raise UnsupportedModelError(f"{source}: {key} differs between layers, which is not supported")
    return value[0] if isinstance(value, list) else value


def _refuse_unsupported(fields: Fields, known: frozenset[str]) -> None:
    for key, neutral in _NEUTRAL.items():
        value = fields.values.get(key, neutral)
        if value != neutral and key not in known:
            raise UnsupportedModelError(f"{fields.source}.{key} = {value!r} is not supported")


def _head_dims(fields: Fields, family: Family, default: int) -> tuple[int, int]:
    """Of a head: all dimensions, and those that RoPE turns."""
    rotated = fields.optional_integer("rope.dimension_count")
    head_dim = fields.integer("attention.key_length", rotated or max(default, 1))
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{fields.source}: keys and values of different sizes are not supported")
    if rotated is not None and rotated != head_dim and not family.partial_rotary:
        raise UnsupportedModelError(
            f"{fields.source}: RoPE over {rotated} of {head_dim} head dimensions is not supported for {family.name}"
        )
    return head_dim, rotated or head_dim


def _window(fields: Fields) -> int | None:
    return (
        None
        if fields.values.get("attention.sliding_window") == 0
        else fields.optional_integer("attention.sliding_window")
    )


def _vocab_size(file: GGUFFile) -> int:
    for tensor in file.tensors:
        if tensor.name == "token_embd.weight":
            return tensor.shape[0]
    raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing")


def _has_bias(family: Family, names: set[str], module: str) -> bool:
    return any(source in names for source in family.gguf_names.sources(f"layers.0.{module}.bias"))


def _rope(file: GGUFFile, fields: Fields, rotary_dim: int, max_positions: int) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10000.0)
    scaling = fields.text("rope.scaling.type", "none")
    check_rope_type(_ROPE_TYPES.get(scaling, scaling), fields.source)
    rope = RopeConfig(
        type=_ROPE_TYPES.get(scaling, scaling),
        theta=theta,
        factor=1.0 if scaling in ("none", "longrope") else fields.number("rope.scaling.factor"),
        original_max_position_embeddings=fields.integer("rope.scaling.original_context_length", max_positions),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )
    check_rope(rope, fields.source)
    factors = {tensor.name: tensor for tensor in file.tensors if tensor.name in _ROPE_FACTORS}
    if not factors:
        return rope
    if scaling not in ("none", "longrope"):
        raise UnsupportedModelError(f"{file.path}: {min(factors)} on top of {scaling} is not supported")
    read = {name: file.read(tensor).float() for name, tensor in factors.items()}
    if _LLAMA3_FACTORS in read:
        return _llama3(read[_LLAMA3_FACTORS], theta, rotary_dim, str(file.path))
    return replace(
        rope,
        type="longrope",
        short_factor=tuple(read.get(_SHORT_FACTORS, Tensor()).tolist()),
        long_factor=tuple(read.get(_LONG_FACTORS, Tensor()).tolist()),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0),
    )


def _llama3(factors: Tensor, theta: float, rotary_dim: int, source: str) -> RopeConfig:
    """Llama 3.1's scaling, which GGUF files hold as what it divides each frequency by.

    The one parameter that differs between such models is the largest of these factors. The rest is verified: a
    file whose factors are not Llama 3.1's is refused.
    """
    rope = RopeConfig(
        type="llama3",
        theta=theta,
        factor=float(factors.max()),
        original_max_position_embeddings=_LLAMA3_ORIGINAL_CONTEXT,
    )
    expected = rope_frequencies(RopeConfig(theta=theta), rotary_dim) / rope_frequencies(rope, rotary_dim)
    if factors.shape != expected.shape or not torch.allclose(factors.float(), expected, rtol=1e-3):
        raise UnsupportedModelError(
            f"{source}: tensor {_LLAMA3_FACTORS} scales RoPE in a way that is not Llama 3.1's, which is not supported"
        )
    return rope
