"""The oracle itself, against the formula written with loops and Python numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from miniserve.attention.base import AttentionVariant
from miniserve.attention.torch_ref import TorchBackend
from tests.attention.steps import MIXED, STEPS, Step, make_step

VARIANT = AttentionVariant(scale=0.25)


def dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def naive(step: Step, scale: float) -> Tensor:
    """One query, one head at a time, over keys that were never paged."""
    num_heads, num_kv_heads = step.query.shape[1], step.key.shape[1]
    rows = []
    queries = iter(step.query.double().tolist())
    for request, query_len in enumerate(step.metadata.query_lens_host):
        keys, values = step.keys[request].double().tolist(), step.values[request].double().tolist()
        for index in range(query_len):
            visible = len(keys) - query_len + index + 1
            query = next(queries)
            row = []
            for head in range(num_heads):
                kv_head = head * num_kv_heads // num_heads
                scores = [scale * dot(query[head], keys[j][kv_head]) for j in range(visible)]
                weights = [math.exp(score - max(scores)) for score in scores]
                row.append(
                    [
                        sum(w * values[j][kv_head][d] for j, w in enumerate(weights)) / sum(weights)
                        for d in range(step.query.shape[2])
                    ]
                )
            rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS.keys())
def test_formula(lengths: tuple[tuple[int, int], ...]) -> None:
    step = make_step(lengths)
    output = TorchBackend(torch.float32).plan(step.metadata)(step.query, step.key_value, VARIANT, step.cache)
    assert output.shape == step.query.shape
    torch.testing.assert_close(output.double(), naive(step, 0.25), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("block_size", [1, 16])
def test_heads_and_block_sizes(num_heads: int, num_kv_heads: int, block_size: int) -> None:
    step = make_step(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size)
    output = TorchBackend(torch.float32).plan(step.metadata)(step.query, step.key_value, VARIANT, step.cache)
    torch.testing.assert_close(output.double(), naive(step, 0.25), atol=1e-5, rtol=1e-5)


def test_bf16_is_rounded_once() -> None:
    """Scores, softmax and sums are fp32: only the output is rounded, by at most half a bf16 step (2 ** -9)."""
    step = make_step(MIXED, dtype=torch.bfloat16, head_dim=64)
    output = TorchBackend(torch.bfloat16).plan(step.metadata)(
        step.query, step.key_value, AttentionVariant(scale=0.125), step.cache
    )
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), naive(step, 0.125), atol=1e-5, rtol=2**-8)
