from __future__ import annotations

import io
import re
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from demos import attn_demo
from demos.attn_demo import DECODE_STEP, MIXED_STEP, SMALL_STEP, Cost, Part, compare, make_step
from miniserve.attention.base import AttentionBackend, AttentionPlan, AttentionVariant, LayerKVCache
from miniserve.attention.batch import AttnMetadata, causal_mask
from miniserve.attention.select import BackendChoice, select_backend
from miniserve.attention.torch_ref import TorchBackend
from miniserve.kernels.native import NativeKernels

CPU = torch.device("cpu")


def toy_step(parts: tuple[Part, ...], block_size: int = 4) -> attn_demo.ToyStep:
    return make_step(parts, block_size=block_size, device=CPU, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def printed() -> str:
    screen = io.StringIO()
    attn_demo.run(console=Console(file=screen, width=100, highlight=False), num_runs=1)
    return screen.getvalue()


def test_each_token_has_a_slot_of_its_own() -> None:
    step = toy_step(SMALL_STEP)
    metadata = step.now.metadata
    owned = metadata.block_tables[metadata.block_tables != 0].tolist()
    assert len(owned) == len(set(owned)) == 3 + 2 + 3
    expected = [
        metadata.block_tables[row, position // 4].item() * 4 + position % 4
        for row, part in enumerate(SMALL_STEP)
        for position in range(part.num_cached, part.num_cached + part.num_new)
    ]
    assert metadata.slot_mapping.tolist() == expected
    assert max(owned) < step.num_blocks


def test_the_step_before_computes_what_is_cached() -> None:
    step = toy_step(SMALL_STEP)
    assert step.before.metadata.seq_lens_host == step.before.metadata.query_lens_host == (10, 6)
    assert step.now.metadata.seq_lens_host == (11, 5, 9)
    backend = TorchBackend(torch.float32)
    cache = step.cache_of(backend)
    written = cache.key_values.flatten(0, 1)[step.before.metadata.slot_mapping]
    assert torch.equal(written, step.before.key_value)
    assert int((cache.key_values != 0).sum()) == written.numel()


@pytest.mark.parametrize("parts", [SMALL_STEP, MIXED_STEP, DECODE_STEP[::5]])
def test_backends_agree_with_the_oracle(native_kernels: NativeKernels, parts: tuple[Part, ...]) -> None:
    compared = compare(toy_step(parts, block_size=32), CPU, native_kernels, num_runs=1)
    results = {result.name: result for result in compared}
    assert list(results) == ["torch", "native", "sdpa", "flash_attn"]
    assert results["torch"].difference == 0.0
    for name in ("native", "sdpa"):
        assert 0.0 < results[name].difference < 1e-5 and results[name].seconds > 0.0
    assert results["flash_attn"].skipped == select_backend("flash_attn", "cpu").reason


def test_native_is_skipped_where_it_cannot_serve(native_kernels: NativeKernels) -> None:
    for kernels, reason in ((native_kernels, "--block-size 4 is no multiple of 32"), (None, "no native kernels")):
        results = {result.name: result for result in compare(toy_step(SMALL_STEP), CPU, kernels, num_runs=1)}
        skipped = results["native"].skipped
        assert skipped is not None and reason in skipped
        assert results["sdpa"].skipped is None


class Shortened(AttentionPlan):
    """Forgets the cached context, as a mask that is aligned at the top left does."""

    def __init__(self, metadata: AttnMetadata) -> None:
        self.metadata = metadata

    def __call__(self, query: Tensor, key_value: Tensor, variant: AttentionVariant, cache: LayerKVCache) -> Tensor:
        value = key_value.chunk(2, dim=1)[1]
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


class ShortenedBackend(AttentionBackend):
    name = "sdpa"

    def plan(self, metadata: AttnMetadata) -> AttentionPlan:
        return Shortened(metadata)


def test_a_wrong_backend_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def select(asked: str, _device_type: str, **_reasons: Any) -> BackendChoice:
        return BackendChoice(TorchBackend if asked == "torch" else ShortenedBackend)

    monkeypatch.setattr(attn_demo, "select_backend", select)
    results = compare(toy_step(SMALL_STEP), CPU, None, num_runs=1)
    assert results[0].difference == 0.0 and results[1].difference > 0.1


def test_costs_are_counted() -> None:
    cost = Cost.of(toy_step(SMALL_STEP).now.metadata)
    pairs = sum(int(causal_mask(p.num_new, p.num_cached + p.num_new, CPU).sum()) for p in SMALL_STEP)
    assert cost.num_new_tokens == 1 + 5 + 3
    assert cost.num_operations == pairs * attn_demo.NUM_HEADS * attn_demo.HEAD_DIM * 2 * 2
    assert cost.num_bytes == (11 + 5 + 9) * 2 * attn_demo.NUM_KV_HEADS * attn_demo.HEAD_DIM * 4


def test_the_slot_in_the_text_is_the_one_in_the_table(printed: str) -> None:
    sentence = re.search(r"is block (\d+), .*? (\d+) x (\d+) \+ (\d+) = (\d+)\.", " ".join(printed.split()))
    assert sentence is not None
    named, block, size, offset, slot = map(int, sentence.groups())
    assert named == block and block * size + offset == slot
    row = next(line for line in printed.splitlines() if line.startswith("A decodes  "))
    assert row.split()[-1] == str(slot) and str(block) in row.split()


def test_the_mask_is_drawn_from_the_bottom_right(printed: str) -> None:
    rows = {line.split()[1]: "".join(line.split()[2:]) for line in printed.splitlines() if line.startswith("token ")}
    assert rows == {"6": "xxxxxxx..", "7": "xxxxxxxx.", "8": "xxxxxxxxx"}


def test_the_comparison_is_printed(printed: str) -> None:
    for step in ("mixed", "decode"):
        assert re.search(rf"^{step} +torch +the oracle +[\d.]+ ms +1\.0 x$", printed, re.MULTILINE)
        for backend in ("native", "sdpa"):
            assert re.search(rf"^{step} +{backend} +\d\.\de-0[678] +[\d.]+ ms +[\d.]+ x$", printed, re.MULTILINE)
    assert "Skipped: flash_attn is passed over: there is no CUDA device." in printed
