"""gpt-oss: sliding and full attention in turn, a sink in each head, and a mixture of experts with a gate of its own.

Its safetensors hold the matrices of all experts of a layer in one tensor; in the published files as MXFP4 (Open Compute
Project, 2023): blocks of 32 four-bit numbers that share a power of two. They are dequantised as they are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from miniserve.errors import CheckpointError, UnsupportedModelError
from miniserve.models.config import ExpertsConfig, LayerConfig, ModelConfig
from miniserve.models.family import GGUF_NAMES, HF_NAMES, Family
from miniserve.models.fields import Fields
from miniserve.models.layer_types import check_experts, full_each, windows_by_layer_type
from miniserve.models.qwen3_moe import GGUF_EXPERTS, describe_gguf_experts
from miniserve.models.stored import StoredTensor

_PERIOD = 2
_STACKED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
# The numbers of the four-bit codes: sign, two bits of exponent, one of mantissa.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_SCALE_BIAS = 127


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window = fields.integer("sliding_window")
    return windows_by_layer_type(fields, num_layers, window, lambda layer: (layer + 1) % _PERIOD != 0)


def _describe(fields: Fields, config: ModelConfig) -> ModelConfig:
    for key, known in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if fields.number(key, known) != known:
            raise UnsupportedModelError(f"{fields.source}: {key} {fields.number(key):g} is not supported, only {known}")
    experts = ExpertsConfig(
        num_experts=fields.integer("num_local_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        intermediate_size=config.intermediate_size,
        normalise=True,
        bias=True,
    )
    check_experts(experts, fields.source)
    layers = tuple(replace(layer, sparse=True) for layer in config.layers)
    return replace(config, layers=layers, experts=experts, sinks=True, activation="clamped_swiglu")


def _describe_gguf(fields: Fields, config: ModelConfig) -> ModelConfig:
    config = describe_gguf_experts(fields, full_each(config, _PERIOD))
    assert config.experts is not None
    return replace(
        config,
        layers=tuple(_untruncated(layer) for layer in config.layers),
        experts=replace(config.experts, bias=True),
        sinks=True,
        activation="clamped_swiglu",
    )


def _untruncated(layer: LayerConfig) -> LayerConfig:
    """With the ramp of its YaRN between pairs that are no whole numbers, which GGUF files cannot say."""
    assert layer.rope is not None
    return replace(layer, rope=replace(layer.rope, truncate=False))


def unstack(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of each expert, in place of those that hold all of a layer's.

    Raises:
        CheckpointError: a tensor does not have the shape that its name promises.
    """
    parts: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        match = _STACKED.fullmatch(name)
        if name.endswith(".self_attn.sinks"):
            parts[f"{name}.weight"] = replace(tensor, name=f"{name}.weight")
        elif match is None:
            parts[name] = tensor
        elif match[3] != "_scales":
            for part in _experts(match, tensor, stored):
                if part.name in parts:
                    raise CheckpointError(f"{tensor.file}: the experts of {name} are there twice")
                parts[part.name] = part
        elif f"{name.removesuffix('_scales')}_blocks" not in stored:  # else they are read with their blocks
            parts[name] = tensor
    return parts


def _experts(match: re.Match[str], tensor: StoredTensor, stored: dict[str, StoredTensor]) -> Iterator[StoredTensor]:
    """One tensor for each expert, as a linear layer has it: gate rows, then up rows."""
    prefix, module, kind = match.groups()
    num_dims = {"": 3, "_bias": 2, "_blocks": 4}[kind]
    if len(tensor.shape) != num_dims:
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}")
    order = _halves_apart if module == "gate_up_proj" else _as_they_are
    scales = _scales_of(tensor, stored) if kind == "_blocks" else None
    rows = tensor.shape[1:]
    shape = {"": rows[::-1], "_bias": rows, "_blocks": (rows[0], 2 * rows[-2] * rows[-1]) if scales else ()}[kind]
    for index in range(tensor.shape[0]):
        yield StoredTensor(
            f"{prefix}.{index}.{module}.{'bias' if kind == '_bias' else 'weight'}",
            shape,
            tensor.file,
            partial(_read, tensor, scales, index, order),
            dtype="F32" if scales is not None else tensor.dtype,
        )


def _scales_of(blocks: StoredTensor, stored: dict[str, StoredTensor]) -> StoredTensor:
    name = f"{blocks.name.removesuffix('_blocks')}_scales"
    scales = stored.get(name)
    if scales is None or scales.shape != blocks.shape[:3] or {scales.dtype, blocks.dtype} != {"U8"}:
        raise CheckpointError(f"{blocks.file}: tensor {name} does not give a scale to each block of {blocks.name}")
    return scales


def _read(tensor: StoredTensor, scales: StoredTensor | None, index: int, order: Callable[[Tensor], Tensor]) -> Tensor:
    assert tensor.read_part is not None
    part = tensor.read_part(index)
    if scales is not None:
        assert scales.read_part is not None
        return order(dequantise_mxfp4(part, scales.read_part(index)))
    return order(part.T if part.dim() == 2 else part)


def dequantise_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """fp32 [num_rows, 32 x num_blocks].

    Args:
        blocks: uint8 [num_rows, num_blocks, 16], two codes each, the lower four bits first.
        scales: uint8 [num_rows, num_blocks], the exponents of two, plus 127.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [num_rows, num_blocks, 32]
    values = torch.tensor(_FP4)[codes.int()]
    return torch.ldexp(values, scales.int().unsqueeze(-1) - _SCALE_BIAS).flatten(1)


def _halves_apart(rows: Tensor) -> Tensor:
    """Rows of gate and up in turn -> those of gate, then those of up."""
    return torch.cat((rows[0::2], rows[1::2]))


def _as_they_are(rows: Tensor) -> Tensor:
    return rows


GPT_OSS = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    gguf_architectures=("gpt-oss",),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    windows=_windows,
    describe=_describe,
    quant_methods=frozenset({"mxfp4"}),
    unstack=unstack,
    gguf_keys=frozenset({"expert_count"}),
    describe_gguf=_describe_gguf,
    hf_names=HF_NAMES.with_layer(
        {
            "attn.sinks": ("self_attn.sinks",),
            "mlp.router.scores": ("mlp.router",),
            "mlp.experts.*.gate_up": ("mlp.experts.*.gate_up_proj",),
            "mlp.experts.*.down": ("mlp.experts.*.down_proj",),
        }
    ),
    gguf_names=GGUF_NAMES.with_layer(
        {"attn.sinks": ("attn_sinks",), "mlp_branch.norm": ("post_attention_norm",), **GGUF_EXPERTS}
    ),
)
