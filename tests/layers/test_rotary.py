"""RoPE: the frequencies of every type against transformers', the turn itself against complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from miniserve.layers.rotary import (
    ROPE_TYPES,
    RopeConfig,
    RotaryEmbedding,
    rope_frequencies,
    rope_magnitude,
    rotate_,
)

CPU = torch.device("cpu")
MAX_POSITIONS = 4096
LLAMA3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
CASES: dict[str, dict[str, Any]] = {
    "default": {"type": "default"},
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "llama3-narrow": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 2.5, "theta": 500000.0},
    "yarn": YARN,
    "yarn-theta": {**YARN, "theta": 1e6},
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-untruncated": {**YARN, "truncate": False},
    "yarn-mscale": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.8},
    "yarn-mscale-alone": {**YARN, "mscale": 1.2},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.3},
    "yarn-factor-1": {**YARN, "factor": 1.0},
}


def reference(case: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """transformers' frequencies and magnitude."""
    parameters = {"rope_theta": 10000.0, **case}
    parameters["rope_type"] = parameters.pop("type")
    parameters["rope_theta"] = parameters.pop("theta", 10000.0)
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=parameters,
    )
    compute: Callable[..., tuple[Tensor, float]] = LlamaRotaryEmbedding.compute_default_rope_parameters
    if case["type"] != "default":
        compute = ROPE_INIT_FUNCTIONS[case["type"]]
    return compute(config, device=CPU)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_magnitude(name: str, head_dim: int) -> None:
    config = RopeConfig(**CASES[name])
    frequencies, magnitude = reference(CASES[name], head_dim)
    assert rope_frequencies(config, head_dim).shape == (head_dim // 2,)
    torch.testing.assert_close(rope_frequencies(config, head_dim), frequencies, atol=0, rtol=1e-5)
    assert rope_magnitude(config) == pytest.approx(magnitude, rel=1e-9)


def test_every_type_is_tested() -> None:
    assert {case["type"] for case in CASES.values()} == set(ROPE_TYPES)


def test_scalings_change_something() -> None:
    """Guard for the test above: each scaled case differs from the plain one."""
    plain = rope_frequencies(RopeConfig(), 64)
    for name, case in CASES.items():
        if name not in ("default", "dynamic", "yarn-factor-1"):
            assert not torch.allclose(rope_frequencies(RopeConfig(**case), 64), plain, rtol=1e-3, atol=0), name


def as_complex(heads: Tensor) -> Tensor:
    """Each pair (i, i + head_dim / 2) as a complex number."""
    first, second = heads.double().chunk(2, dim=-1)
    return torch.complex(first, second)


@pytest.mark.parametrize("name", ["default", "llama3", "yarn-attention-factor"])
def test_rotate_is_multiplication_by_a_unit_number(name: str) -> None:
    config = RopeConfig(**CASES[name])
    rotary = RotaryEmbedding(config, 16, 64, device=CPU)
    heads = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 5, 63])
    cos, sin = rotary(positions).cos_sin
    assert cos.shape == sin.shape == (3, 1, 16) and cos.dtype == sin.dtype == torch.float32
    angles = torch.outer(positions.double(), rope_frequencies(config, 16).double())
    expected = as_complex(heads) * torch.polar(torch.full_like(angles, rope_magnitude(config)), angles)[:, None, :]
    rotate_(heads, cos, sin)
    torch.testing.assert_close(as_complex(heads), expected, atol=1e-5, rtol=1e-5)


def test_scores_depend_on_the_distance_only() -> None:
    rotary = RotaryEmbedding(RopeConfig(), 32, 256, device=CPU)
    query, key = torch.randn(2, 1, 1, 32, generator=torch.Generator().manual_seed(0))

    def score(query_position: int, key_position: int) -> float:
        turned_query, turned_key = query[None].clone(), key[None].clone()
        rotate_(turned_query, *rotary(torch.tensor([query_position])).cos_sin)
        rotate_(turned_key, *rotary(torch.tensor([key_position])).cos_sin)
        return float((turned_query * turned_key).sum())

    assert score(7, 3) == pytest.approx(score(204, 200), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 5), abs=1e-2)


def test_bf16_heads_are_turned_in_fp32() -> None:
    rotary = RotaryEmbedding(RopeConfig(), 16, 4096, device=CPU)
    heads = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    cos_sin, exact = rotary(torch.tensor([4000, 4095])).cos_sin, heads.float()
    rotate_(heads, *cos_sin)
    rotate_(exact, *cos_sin)
    assert torch.equal(heads, exact.bfloat16())


def test_the_table_is_no_weight() -> None:
    """A checkpoint neither has it nor is asked for it."""
    rotary = RotaryEmbedding(RopeConfig(), 16, 8, device=CPU)
    assert not rotary.state_dict() and not list(rotary.parameters())
