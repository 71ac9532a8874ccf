"""Which attention backend a model gets: what the model needs, the blocks, and what was tried out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from miniserve.attention.base import AttentionBackend
from miniserve.attention.flash_attn import FLASH_BACKENDS, PackageFlash, TorchFlash
from miniserve.attention.probe import ProbeShape
from miniserve.attention.sdpa import SdpaBackend
from miniserve.config import EngineConfig, ResolvedConfig, resolve
from miniserve.kernels.load import KernelChoice
from miniserve.models.config import ModelConfig
from miniserve.platform import Machine
from miniserve.runner import backend as backend_module
from miniserve.runner.backend import ChosenBackend, choose_backend, variants_of
from tests.runner.tiny import CONFIG

CUDA = Machine(("cuda", "cpu"), physical_cores=2, cpu_has_bf16=False)
WINDOWED = replace(CONFIG, layers=(replace(CONFIG.layers[0], window=16), *CONFIG.layers))


def settled(**options: Any) -> tuple[EngineConfig, ResolvedConfig]:
    asked = EngineConfig(model="m", **options)
    return asked, resolve(asked, CUDA, model_max_len=64)


class Tried:
    """Stands for the device: which libraries serve which blocks."""

    def __init__(self, serves: Mapping[Any, int]) -> None:
        self.serves = serves  # the smallest block
        self.windows: list[int | None] = []

    def __call__(self, backend: AttentionBackend, shape: ProbeShape, variants: Any, device: torch.device) -> str | None:
        assert device.type == "cuda" and backend.dtype == torch.bfloat16
        self.windows = [variant.window for variant in variants]
        smallest = self.serves.get(type(backend))
        return None if smallest is not None and shape.block_size >= smallest else "it cannot"


def choose(monkeypatch: pytest.MonkeyPatch, tried: Tried, config: ModelConfig, **options: Any) -> ChosenBackend:
    monkeypatch.setattr(backend_module, "why_not", tried)
    for library in FLASH_BACKENDS:
        monkeypatch.setattr(library, "missing", lambda: None)
    asked, resolved = settled(**options)
    return choose_backend(asked, resolved, config, KernelChoice(None))


def test_small_blocks_are_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose(monkeypatch, Tried({TorchFlash: 256, PackageFlash: 16}), CONFIG)
    assert (type(chosen.backend), chosen.block_size) == (PackageFlash, 16)
    assert chosen.backend.label == "flash_attn (flash-attn package)"
    assert chosen.reason == "flash_attn (torch) is passed over: with blocks of 16: it cannot"


def test_large_blocks_where_nothing_takes_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose(monkeypatch, Tried({PackageFlash: 256}), CONFIG)
    assert (type(chosen.backend), chosen.block_size) == (PackageFlash, 256)


def test_the_asked_block_size_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose(monkeypatch, Tried({PackageFlash: 256}), CONFIG, block_size=32)
    assert (type(chosen.backend), chosen.block_size) == (SdpaBackend, 32)
    assert chosen.reason is not None and chosen.reason.count("with blocks of 32: it cannot") == 2


def test_nothing_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then with the small blocks, and the reasons for these."""
    chosen = choose(monkeypatch, Tried({}), CONFIG)
    assert (type(chosen.backend), chosen.block_size) == (SdpaBackend, 16)
    assert chosen.reason is not None and chosen.reason.count("with blocks of 16: it cannot") == 2


def test_every_kind_of_layer_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Tried({TorchFlash: 16})
    assert isinstance(choose(monkeypatch, tried, WINDOWED).backend, TorchFlash)
    assert tried.windows == [16, None]


def test_what_a_library_lacks_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with_sinks, capped = replace(CONFIG, sinks=True), replace(CONFIG, attention_soft_cap=50.0)
    serves = {TorchFlash: 16, PackageFlash: 16}
    chosen = choose(monkeypatch, Tried(serves), with_sinks)
    assert isinstance(chosen.backend, SdpaBackend)
    assert chosen.reason is not None and chosen.reason.count("it has no attention sinks") == 2
    assert isinstance(choose(monkeypatch, Tried(serves), capped).backend, PackageFlash)


def test_variants() -> None:
    [windowed, full] = variants_of(replace(WINDOWED, attention_soft_cap=5.0))
    assert (windowed.window, full.window) == (16, None)
    assert windowed.soft_cap == full.soft_cap == 5.0 and windowed.scale == CONFIG.attention_scale
