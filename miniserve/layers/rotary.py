"""Rotary position embedding (Su et al., 2021) and the scalings that stretch it to longer contexts.

Dimensions i and i + rotary_dim / 2 of a head form a pair that is turned by position x frequency[i]; rotary_dim is the
head's size, or less: what is behind it stays as it is. Nothing here depends on the length of a sequence, so a key that
is in the cache stays right.
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
    original_max_position_embeddings, beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate),
    longrope (short_factor, long_factor, factor, attention_factor, original_max_position_embeddings).
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
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def original_context(self) -> int:
        """The context length before scaling, which llama3, yarn and longrope need."""
        assert self.original_max_position_embeddings is not None, "checked when the checkpoint is parsed"
        return self.original_max_position_embeddings


def rope_frequencies(config: RopeConfig, rotary_dim: int, max_positions: int = 0) -> Tensor:
    """Radians per position of each pair, fp32 [rotary_dim / 2]; of longrope for sequences up to `max_positions`."""
    if config.type == "longrope":
        return _longrope(config, rotary_dim, max_positions)
    return ROPE_TYPES[config.type](config, rotary_dim)


def rope_magnitude(config: RopeConfig) -> float:
    """The factor on cos and sin: the attention temperature of yarn and longrope, else 1."""
    if config.type not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.type == "longrope":
        return _longrope_magnitude(config)
    if config.mscale and config.mscale_all_dim:
        return _yarn_magnitude(config.factor, config.mscale) / _yarn_magnitude(config.factor, config.mscale_all_dim)
    return _yarn_magnitude(config.factor, 1.0)


def _longrope_magnitude(config: RopeConfig) -> float:
    """LongRoPE (Ding et al., 2024), as Phi-3 uses it."""
    if config.factor <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(config.factor) / math.log(config.original_context))


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _default(config: RopeConfig, rotary_dim: int) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return 1.0 / (config.theta**exponents)


def _linear(config: RopeConfig, rotary_dim: int) -> Tensor:
    """Position interpolation (Chen et al., 2023)."""
    return _default(config, rotary_dim) / config.factor


def _llama3(config: RopeConfig, rotary_dim: int) -> Tensor:
    """Llama 3.1: slow pairs are interpolated, fast ones kept, those between blended by wavelength."""
    frequencies = _default(config, rotary_dim)
    turns = config.original_context * frequencies / (2 * math.pi)  # full turns within the original context
    keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequencies * keep + frequencies / config.factor * (1.0 - keep)


def _yarn(config: RopeConfig, rotary_dim: int) -> Tensor:
    """YaRN (Peng et al., 2023): the same blend, over a ramp of pair indices between two numbers of turns."""
    frequencies = _default(config, rotary_dim)
    low = _yarn_pair_index(config, config.beta_fast, rotary_dim)
    high = _yarn_pair_index(config, config.beta_slow, rotary_dim)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = max(high - low, 0.001)
    interpolate = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies * (1.0 - interpolate) + frequencies / config.factor * interpolate


def _yarn_pair_index(config: RopeConfig, turns: float, rotary_dim: int) -> float:
    """The (fractional) pair that makes `turns` full turns within the original context."""
    return rotary_dim * math.log(config.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))


def _longrope(config: RopeConfig, rotary_dim: int, max_positions: int) -> Tensor:
    """LongRoPE (Ding et al., 2024): a factor for each pair, and others where sequences may exceed the original context.

    One set serves all of a server's sequences, so that keys in the cache stay right.
    """
    factors = config.long_factor if max_positions > config.original_context else config.short_factor
    return _default(config, rotary_dim) / torch.tensor(factors, dtype=torch.float32)


# `dynamic` equals `default` within the original context, and a model is never run beyond it.
ROPE_TYPES: dict[str, Callable[[RopeConfig, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
}
ROPE_NAMES = (*ROPE_TYPES, "longrope")


class RotaryEmbedding(nn.Module):
    """The table of cos and sin for every position up to `max_positions`, and their application."""

    table: Tensor  # fp32 [max_positions, 2, rotary_dim]

    def __init__(self, config: RopeConfig, rotary_dim: int, max_positions: int, *, device: torch.device) -> None:
        super().__init__()
        frequencies = rope_frequencies(config, rotary_dim, max_positions)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
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
        table: fp32 [max_positions, 2, rotary_dim], cos and signed sin.
        positions: int64 [num_tokens].
    """

    table: Tensor
    positions: Tensor

    @cached_property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """cos and sin, each fp32 [num_tokens, 1, rotary_dim], for `rotate_`."""
        cos, sin = self.table[self.positions].unbind(dim=1)
        return cos.unsqueeze(1), sin.unsqueeze(1)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn each pair of `heads` [num_tokens, num_heads, head_dim] in place; rounded to its dtype once, at the end."""
    rotated = heads[..., : cos.shape[-1]]
    half_swapped = rotated.roll(rotated.shape[-1] // 2, dims=-1)
    rotated.copy_(torch.addcmul(rotated * cos, half_swapped, sin))
