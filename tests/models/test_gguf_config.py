"""GGUF metadata -> ModelConfig."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from miniserve.errors import CheckpointError, UnsupportedModelError
from miniserve.layers.rotary import RopeConfig, rope_frequencies
from miniserve.models.gguf import GGUFFile
from miniserve.models.gguf_config import parse_gguf_config
from miniserve.models.hf_config import ParsedConfig
from tests.models.ropes import only_rope

SHAPES: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
EMBED = {"token_embd.weight": np.zeros((96, 32), np.float32)}
Parse = Callable[..., ParsedConfig]


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)


@pytest.fixture
def parse(tmp_path: Path) -> Parse:
    """Parse a file of `SHAPES` with fields changed (None drops one), other metadata and tensors added."""

    def parse(
        fields: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray] | None = None,
        *,
        architecture: str = "llama",
        other: dict[str, Any] | None = None,
    ) -> ParsedConfig:
        path = tmp_path / "a.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in {**SHAPES, **(fields or {})}.items():
            if value is not None:
                add(writer, f"{architecture}.{key}", value)
        for key, value in (other or {}).items():
            add(writer, key, value)
        for name, values in (EMBED if tensors is None else {**EMBED, **tensors}).items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return parse_gguf_config(GGUFFile(path))

    return parse


def test_shapes_and_defaults(parse: Parse) -> None:
    config = parse().config
    assert (config.family, config.vocab_size, config.hidden_size) == ("llama", 96, 32)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert only_rope(config).type == "default"
    assert only_rope(config).theta == 10000.0
    assert config.max_position_embeddings == 128


def test_the_head_is_tied_without_an_output_tensor(parse: Parse) -> None:
    assert parse().config.tie_word_embeddings
    assert not parse(tensors={"output.weight": np.zeros((96, 32), np.float32)}).config.tie_word_embeddings


def test_biases_are_seen_in_the_tensors(parse: Parse) -> None:
    bias = np.zeros(32, np.float32)
    assert not parse(architecture="qwen2").config.qkv_bias
    assert parse(architecture="qwen2", tensors={"blk.0.attn_q.bias": bias}).config.qkv_bias
    assert parse(tensors={"blk.0.attn_output.bias": bias}).config.o_bias
    assert parse(tensors={"blk.0.ffn_gate.bias": bias}).config.mlp_bias
    assert parse(architecture="qwen3").config.qk_norm


def test_head_dim_from_key_length_or_rotated_dimensions(parse: Parse) -> None:
    assert parse({"attention.key_length": 16, "attention.value_length": 16}).config.head_dim == 16
    assert parse({"rope.dimension_count": 16}).config.head_dim == 16
    with pytest.raises(UnsupportedModelError, match="8 of 16"):
        parse({"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 8})


def test_end_tokens_of_sentence_and_of_turn(parse: Parse) -> None:
    """Bug kind: chat models of this format end a turn with a token of its own, and ran on after it."""
    other = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 6}
    assert parse(other=other).config.eos_token_ids == {5, 6}


def test_rope_scaling_keys(parse: Parse) -> None:
    linear = parse({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}).config
    assert (only_rope(linear).type, only_rope(linear).factor) == ("linear", 2.0)
    yarn = parse(
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.freq_base": 1e6,
        }
    ).config
    assert (only_rope(yarn).type, only_rope(yarn).theta, only_rope(yarn).original_max_position_embeddings) == (
        "yarn",
        1e6,
        64,
    )
    assert yarn.max_position_embeddings == 256


def test_a_sliding_window_is_that_of_all_layers(parse: Parse) -> None:
    assert [layer.window for layer in parse({"attention.sliding_window": 50}).config.layers] == [50, 50]
    assert [layer.window for layer in parse({"attention.sliding_window": 0}).config.layers] == [None, None]


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_in_its_factors(parse: Parse, factor: float) -> None:
    """Bug kind: Llama 3.1 files carry the scaling only as a tensor; without it long prompts go wrong."""
    llama3 = RopeConfig(type="llama3", theta=5e5, factor=factor, original_max_position_embeddings=8192)
    frequencies = rope_frequencies(llama3, 64)
    factors = (rope_frequencies(RopeConfig(theta=5e5), 64) / frequencies).numpy()
    fields = {"attention.key_length": 64, "attention.value_length": 64, "rope.freq_base": 5e5}
    rope = only_rope(parse(fields, {"rope_freqs.weight": factors}).config)
    assert rope.type == "llama3"
    assert torch.allclose(rope_frequencies(rope, 64), frequencies, rtol=1e-5)


def test_other_rope_factors_are_refused_by_name(parse: Parse) -> None:
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        parse(tensors={"rope_freqs.weight": np.linspace(1, 8, 4, dtype=np.float32)})


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"block_count": None}, CheckpointError, "block_count is missing"),
        ({"attention.layer_norm_rms_epsilon": None}, CheckpointError, "layer_norm_rms_epsilon is missing"),
        ({"embedding_length": "wide"}, CheckpointError, "embedding_length must be"),
        ({"attention.head_count_kv": [2, 1]}, UnsupportedModelError, "head_count_kv differs between layers"),
        ({"expert_count": 8}, UnsupportedModelError, "expert_count = 8"),
        ({"rope.scaling.type": "longrope"}, CheckpointError, "short_factor"),
        ({"rope.scaling.type": "linear"}, CheckpointError, "rope.scaling.factor is missing"),
        ({"attention.key_length": 16, "attention.value_length": 8}, UnsupportedModelError, "different sizes"),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    parse: Parse, fields: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        parse(fields)


def test_layers_that_agree_are_one_value(parse: Parse) -> None:
    assert parse({"attention.head_count_kv": [2, 2]}).config.num_kv_heads == 2


def test_an_unsupported_architecture_is_refused(parse: Parse) -> None:
    with pytest.raises(UnsupportedModelError, match="mamba"):
        parse(architecture="mamba")
