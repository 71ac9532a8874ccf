"""A GGUF file of a family is the same model as the safetensors that it was made from.

The files are written here, with the names that the gguf package gives and by what llama.cpp's converter does: it adds
one to Gemma's norms, puts the rows of q and k of some families into its own order, and stacks experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from miniserve.errors import CheckpointError, UnsupportedModelError
from miniserve.models.checkpoint import open_checkpoint
from miniserve.models.config import ModelConfig, RopeConfig
from miniserve.models.loader import load_weights
from miniserve.models.transformer import Transformer
from tests.support import TINY_SHAPE, WINDOW, tiny_model

EPS = 2.0**-20  # a float32, as all numbers of a GGUF file
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A family's tiny model, and what its GGUF file says of it beyond what all say."""

    architecture: gguf.MODEL_ARCH
    overrides: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    pairs_adjacent: bool = False
    norm_offset: float = 0.0


SLIDES = {"attention.sliding_window": WINDOW}
CASES: dict[str, Case] = {
    "llama": Case(gguf.MODEL_ARCH.LLAMA, pairs_adjacent=True),
    "qwen2": Case(gguf.MODEL_ARCH.QWEN2, {"head_dim": 16}),
    "qwen3": Case(gguf.MODEL_ARCH.QWEN3),
    "qwen3_moe": Case(
        gguf.MODEL_ARCH.QWEN3MOE,
        {"mlp_only_layers": []},
        {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32},
    ),
    "gemma2": Case(
        gguf.MODEL_ARCH.GEMMA2,
        {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
        {**SLIDES, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        norm_offset=1.0,
    ),
    "gemma3": Case(
        gguf.MODEL_ARCH.GEMMA3,
        {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
        {**SLIDES, "rope.freq_base": 1e6},
        norm_offset=1.0,
    ),
    "smollm3": Case(gguf.MODEL_ARCH.SMOLLM3, {}, {"rope.freq_base": 2e6}, pairs_adjacent=True),
    "phi3": Case(gguf.MODEL_ARCH.PHI3, {}, {**SLIDES, "rope.dimension_count": 12}),
    "olmo2": Case(gguf.MODEL_ARCH.OLMO2),
    "olmo3": Case(gguf.MODEL_ARCH.OLMO2, {}, {**SLIDES, "rope.freq_base": 5e5}),
    "granite": Case(
        gguf.MODEL_ARCH.GRANITE,
        {"residual_multiplier": 0.25, "attention_multiplier": 0.125},
        {"embedding_scale": 3.0, "residual_scale": 0.25, "logit_scale": 0.25, "attention.scale": 0.125},
        pairs_adjacent=True,
    ),
    "gpt_oss": Case(
        gguf.MODEL_ARCH.GPT_OSS,
        {"max_position_embeddings": 131072},
        {
            **SLIDES,
            "context_length": 131072,
            "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_feed_forward_length": 96,
        },
    ),
}


def write_gguf(path: Path, case: Case, tensors: Mapping[str, Tensor], **keys: Any) -> None:
    """`tensors` with their names in safetensors."""
    architecture = gguf.MODEL_ARCH_NAMES[case.architecture]
    writer = gguf.GGUFWriter(path, architecture)
    shape = {
        "block_count": 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")),
        "context_length": TINY_SHAPE["max_position_embeddings"],
        "embedding_length": TINY_SHAPE["hidden_size"],
        "feed_forward_length": TINY_SHAPE["intermediate_size"],
        "attention.head_count": TINY_SHAPE["num_attention_heads"],
        "attention.head_count_kv": TINY_SHAPE["num_key_value_heads"],
        "attention.key_length": TINY_SHAPE["head_dim"],
        "attention.value_length": TINY_SHAPE["head_dim"],
        "attention.layer_norm_rms_epsilon": EPS,
    }
    for key, value in {**shape, **case.keys, **keys}.items():
        kind = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
        writer.add_key_value(f"{architecture}.{key}", value, kind[type(value)])
    names = gguf.get_tensor_name_map(case.architecture, shape["block_count"])
    for name, values in as_llama_cpp_has_them(tensors, case).items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")) or name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_llama_cpp_has_them(tensors: Mapping[str, Tensor], case: Case) -> dict[str, np.ndarray]:
    values: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        prefix, _, rest = name.partition(".experts.")
        if "gate_up_proj" in rest:  # gpt-oss: [experts, hidden, gate and up in turn]
            ending = ".bias" if rest.endswith("_bias") else ".weight"
            for index, part in enumerate(("gate_proj", "up_proj")):
                half = tensor[..., index::2]
                values[f"{prefix}.experts.{part}{ending}"] = half if ending == ".bias" else half.mT
        elif rest == "down_proj":
            values[f"{prefix}.experts.down_proj.weight"] = tensor.mT
        elif rest == "down_proj_bias":
            values[f"{prefix}.experts.down_proj.bias"] = tensor
        elif rest:  # one expert
            experts.setdefault(f"{prefix}.experts.{rest.partition('.')[2]}", []).append(tensor)
        elif name.endswith(".sinks"):
            values[f"{name}.weight"] = tensor
        elif name.endswith("norm.weight"):
            values[name] = tensor + case.norm_offset
        elif case.pairs_adjacent and (".q_proj." in name or ".k_proj." in name):
            heads = tensor.view(-1, 2, TINY_SHAPE["head_dim"] // 2, *tensor.shape[1:])
            values[name] = heads.transpose(1, 2).reshape(tensor.shape)
        else:
            values[name] = tensor
    values.update((name, torch.stack(parts)) for name, parts in experts.items())
    return {name: tensor.contiguous().numpy() for name, tensor in values.items()}


def described(path: Path) -> ModelConfig:
    """Without what an unscaled RoPE does not use."""
    config = open_checkpoint(str(path)).config
    layers = []
    for layer in config.layers:
        is_plain = layer.rope is not None and layer.rope.type == "default"
        layers.append(replace(layer, rope=RopeConfig(theta=layer.rope.theta)) if is_plain and layer.rope else layer)
    return replace(config, layers=tuple(layers))


def parameters(path: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(str(path))
    model = Transformer(checkpoint.config, max_positions=64, dtype=torch.float32, device=CPU)
    load_weights(model, checkpoint)
    return {name: parameter.data for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", CASES)
def test_both_files_are_one_model(tmp_path: Path, family: str) -> None:
    case = CASES[family]
    tiny_model(tmp_path, family, rms_norm_eps=EPS, **case.overrides)
    write_gguf(tmp_path / "a.gguf", case, load_file(tmp_path / "model.safetensors"))
    config = described(tmp_path)
    assert replace(described(tmp_path / "a.gguf"), family=config.family) == config
    expected, loaded = parameters(tmp_path), parameters(tmp_path / "a.gguf")
    assert loaded.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(loaded[name], values), name


def test_longrope_is_read_from_its_factors(tmp_path: Path) -> None:
    short, long = [1.0, 1.25, 1.5, 2.0, 2.5, 3.0], [2.0, 2.5, 3.0, 4.0, 5.0, 6.0]
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "factor": 4.0}
    rope = {**scaling, "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "attention_factor": 1.25}
    tiny_model(tmp_path, "phi3", rms_norm_eps=EPS, rope_parameters=rope, original_max_position_embeddings=128)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["rope_factors_short.weight"], tensors["rope_factors_long.weight"] = map(torch.tensor, (short, long))
    keys = {"rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.25}
    write_gguf(tmp_path / "a.gguf", CASES["phi3"], tensors, **keys)
    [expected] = {layer.rope for layer in open_checkpoint(str(tmp_path)).config.layers}
    [loaded] = {layer.rope for layer in open_checkpoint(str(tmp_path / "a.gguf")).config.layers}
    assert expected is not None and loaded == replace(expected, factor=1.0)  # unused beside attention_factor
    assert parameters(tmp_path / "a.gguf").keys() == parameters(tmp_path).keys()


def test_a_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m-00001-of-00002.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="merge the parts"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("layers", [46, 62])
def test_the_largest_gemmas_scale_scores_by_another_size(tmp_path: Path, layers: int) -> None:
    family = "gemma2" if layers == 46 else "gemma3"
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(layers)]
    tensors = {name: torch.ones(64) for name in names} | {"model.embed_tokens.weight": torch.zeros(8, 64)}
    write_gguf(
        tmp_path / "a.gguf", CASES[family], tensors, **{"attention.key_length": 32, "attention.value_length": 32}
    )
    assert open_checkpoint(str(tmp_path / "a.gguf")).config.attention_scale == (64 / 4) ** -0.5


@pytest.mark.parametrize(
    ("family", "keys", "error", "named"),
    [
        ("llama", {"expert_count": 8}, UnsupportedModelError, "expert_count"),
        ("llama", {"final_logit_softcapping": 30.0}, UnsupportedModelError, "final_logit_softcapping"),
        ("qwen3_moe", {"expert_used_count": 9}, CheckpointError, "9 of 8 experts"),
        ("granite", {"logit_scale": 0.0}, CheckpointError, "scale of 0"),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    tmp_path: Path, family: str, keys: dict[str, Any], error: type[Exception], named: str
) -> None:
    tensors = {"model.layers.0.input_layernorm.weight": torch.ones(64), "model.embed_tokens.weight": torch.zeros(8, 64)}
    write_gguf(tmp_path / "a.gguf", CASES[family], tensors, **keys)
    with pytest.raises(error, match=named):
        open_checkpoint(str(tmp_path / "a.gguf"))
