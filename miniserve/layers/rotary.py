"""Rotary position embedding (Su et al., 2021) and the scalings that stretch it to longer contexts.

Dimensions i and i + head_dim / 2 of a head form a pair that is turned by position x frequency[i]. Nothing here
depends on the length of a sequence, so a key that is in the cache stays right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The base `theta` and the scaling that `type` names, with that scaling's parameters.

    Fields carry the names of config.json's `rope_parameters`; a type uses the ones it knows: default (none),
    linear (factor), dynamic (none within the original context, see `ModelConfig`), llama3 (factor,
    low_freq_factor, high_freq_factor, original_max_position_embeddings), yarn (factor,
    original_max_position_embeddings, beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate).
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def original_context(self) -> int:
        """The context length before scaling, which llama3 and yarn need."""
        assert self.original_max_position_embeddings is not None, "checked when the checkpoint is parsed"
        return self.original_max_position_embeddings


def rope_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair, fp32 [head_dim / 2]."""
    return ROPE_TYPES[config.type](config, head_dim)


def rope_magnitude(config: RopeConfig) -> float:
    """The factor on cos and sin: yarn's attention temperature (Peng et al., 2023, section 3.4), else 1."""
    if config.type != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _yarn_magnitude(config.factor, config.mscale) / _yarn_magnitude(config.factor, config.mscale_all_dim)
    return _yarn_magnitude(config.factor, 1.0)


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _default(config: RopeConfig, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (config.theta**exponents)


def _linear(config: RopeConfig, head_dim: int) -> Tensor:
    """Position interpolation (Chen et al., 2023)."""
    return _default(config, head_dim) / config.factor


def _llama3(config: RopeConfig, head_dim: int) -> Tensor:
    """Llama 3.1: slow pairs are interpolated, fast ones kept, those between blended by wavelength."""
    frequencies = _default(config, head_dim)
    turns = config.original_context * frequencies / (2 * math.pi)  # full turns within the original context
    keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequencies * keep + frequencies / config.factor * (1.0 - keep)


def _yarn(config: RopeConfig, head_dim: int) -> Tensor:
    """YaRN (Peng et al., 2023): the same blend, over a ramp of pair indices between two numbers of turns."""
    frequencies = _default(config, head_dim)
    low = _yarn_pair_index(config, config.beta_fast, head_dim)
    high = _yarn_pair_index(config, config.beta_slow, head_dim)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = max(high - low, 0.001)
    interpolate = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies * (1.0 - interpolate) + frequencies / config.factor * interpolate


def _yarn_pair_index(config: RopeConfig, turns: float, head_dim: int) -> float:
    """The (fractional) pair that makes `turns` full turns within the original context."""
    return head_dim * math.log(config.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))


# `dynamic` equals `default` within the original context, and a model is never run beyond it.
ROPE_TYPES: dict[str, Callable[[RopeConfig, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
}


class RotaryEmbedding(nn.Module):
    """The table of cos and sin for every position up to `max_positions`, and their application."""

    table: Tensor  # fp32 [max_positions, 2, head_dim]

    def __init__(self, config: RopeConfig, head_dim: int, max_positions: int, *, device: torch.device) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), rope_frequencies(config, head_dim))
        # Both halves of a head turn by the same angle; the first half subtracts its sine.
        cos = angles.cos().repeat(1, 2)
        sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
        table = torch.stack((cos, sin), dim=1) * rope_magnitude(config)
        self.register_buffer("table", table.to(device), persistent=False)

    def forward(self, positions: Tensor) -> Rope:
        """positions: int64 [num_tokens] -> their rotation."""
        return Rope(self.table, positions)


@dataclass(frozen=True)
class Rope:
    """The rotation of one step's tokens. Looked up on first use: some backends read the table themselves.

    Attributes:
        table: fp32 [max_positions, 2, head_dim], cos and signed sin.
        positions: int64 [num_tokens].
    """

    table: Tensor
    positions: Tensor

    @cached_property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """cos and sin, each fp32 [num_tokens, 1, head_dim], for `rotate_`."""
        cos, sin = self.table[self.positions].unbind(dim=1)
        return cos.unsqueeze(1), sin.unsqueeze(1)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn each pair of `heads` [num_tokens, num_heads, head_dim] in place; rounded to its dtype once, at the end."""
    half_swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    heads.copy_(torch.addcmul(heads * cos, half_swapped, sin))
