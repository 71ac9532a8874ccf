"""Logprobs, ranks and the most probable tokens: the operator and its twin, the same bit for bit in any batch."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from torch import Tensor

from miniserve.kernels import sampling
from miniserve.kernels.native import NativeKernels
from miniserve.kernels.sampling import SamplingOperators


def operators_of(kernels: NativeKernels) -> tuple[SamplingOperators, SamplingOperators]:
    return kernels, sampling


def random_logits(num_rows: int, size: int, *, scale: float = 4.0) -> Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size)) * scale


@pytest.mark.parametrize("scale", [0.001, 4.0, 40.0])
@pytest.mark.parametrize("size", [1, 7, 16, 17, 1023, 1025, 49152, 151936])
def test_against_log_softmax_in_double_precision(kernels: NativeKernels, size: int, scale: float) -> None:
    logits = random_logits(3, size, scale=scale)
    token_ids = torch.tensor([0, size // 2, size - 1])
    expected = logits.double().log_softmax(-1)
    for num_top in {0, 1, min(20, size)}:
        ranks, logprobs, top_ids = kernels.token_logprobs(logits, token_ids, num_top)
        twin = sampling.token_logprobs(logits, token_ids, num_top)
        own = logits.gather(1, token_ids[:, None])
        assert ranks.tolist() == (1 + (logits > own).sum(1)).tolist() == twin[0].tolist()
        top = expected.topk(num_top)
        wanted = torch.cat((expected.gather(1, token_ids[:, None]), top.values), dim=1)
        torch.testing.assert_close(logprobs.double(), wanted, atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(twin[1], logprobs, atol=1e-5, rtol=1e-6)
        assert torch.equal(top_ids.long(), logits.topk(num_top).indices) and torch.equal(top_ids, twin[2])


@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize("size", [259, 49152, 70001])
def test_alone_as_in_any_batch(kernels: NativeKernels, size: int) -> None:
    """Bug: PyTorch's logsumexp shares one row among threads, and of many rows each thread sums its own."""
    logits = random_logits(17, size)
    token_ids = torch.arange(17) * 7
    for operators in operators_of(kernels):
        torch.set_num_threads(2)
        alone = [operators.token_logprobs(logits[i : i + 1], token_ids[i : i + 1], 5) for i in range(17)]
        for num_rows in range(1, 18):
            for threads in (1, 2, 3, 4) if operators is kernels else (2,):
                torch.set_num_threads(threads)
                together = operators.token_logprobs(logits[:num_rows], token_ids[:num_rows], 5)
                for field, actual in enumerate(together):
                    assert torch.equal(actual, torch.cat([one[field] for one in alone[:num_rows]]))


def test_of_equals_the_first(kernels: NativeKernels) -> None:
    logits = torch.zeros(2, 1000)
    logits[1, 700:] = 1.0
    ranks, _, top_ids = kernels.token_logprobs(logits, torch.tensor([999, 0]), 4)
    assert ranks.tolist() == [1, 301]
    assert top_ids.tolist() == [[0, 1, 2, 3], [700, 701, 702, 703]]


def test_tokens_that_cannot_be(kernels: NativeKernels) -> None:
    logits = torch.full((1, 40), -inf)
    logits[0, [3, 30]] = torch.tensor([0.0, 1.0])
    ranks, logprobs, top_ids = kernels.token_logprobs(logits, torch.tensor([5]), 4)
    assert ranks.tolist() == [3] and top_ids.tolist() == [[30, 3, 0, 1]]
    assert logprobs[0, 0] == -inf and logprobs[0, 3:].tolist() == [-inf, -inf]


@pytest.mark.parametrize("place", [0, 15, 16, 38])
@pytest.mark.parametrize("value", [nan, inf])
def test_a_row_without_probabilities(kernels: NativeKernels, value: float, place: int) -> None:
    logits = random_logits(4, 39)
    expected = kernels.token_logprobs(logits, torch.tensor([0, 15, 16, 38]), 3)
    logits[1, place] = value
    logits[2] = -inf
    _, logprobs, top_ids = kernels.token_logprobs(logits, torch.tensor([0, 15, 16, 38]), 3)
    assert logprobs[1:3].isnan().all() and top_ids.min() >= 0
    assert torch.equal(logprobs[[0, 3]], expected[1][[0, 3]])


def test_rows_of_a_padded_vocabulary(kernels: NativeKernels) -> None:
    whole = torch.full((3, 300), 100.0)
    logits = whole[:, 20:279]
    logits.copy_(random_logits(3, 259))
    token_ids = torch.tensor([0, 100, 258])
    for actual, expected in zip(
        kernels.token_logprobs(logits, token_ids, 5), kernels.token_logprobs(logits.clone(), token_ids, 5), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("named", "place", "value"),
    [
        ("logits", 0, torch.zeros(2, 5).double()),
        ("ids", 1, torch.tensor([0, 5])),
        ("ids", 1, torch.zeros(3).long()),
        ("ranks", 2, torch.zeros(2)),
        ("ranks", 2, torch.zeros(1).int()),
        ("logprobs", 3, torch.zeros(2, 3)),
        ("top_ids", 4, torch.zeros(2, 6).int()),
        ("top_ids", 4, torch.zeros(1, 3).int()),
    ],
)
def test_what_is_refused(kernels: NativeKernels, named: str, place: int, value: Tensor) -> None:
    arguments = [torch.zeros(2, 5), torch.zeros(2).long(), torch.zeros(2).int(), torch.zeros(2, 4)]
    arguments.append(torch.zeros(2, 3).int())
    arguments[place] = value
    with pytest.raises(RuntimeError, match=rf"\b{named}\b"):
        kernels._token_logprobs(*arguments)


def test_tracing(kernels: NativeKernels) -> None:
    arguments = (torch.zeros(2, 5), torch.zeros(2).long(), torch.zeros(2).int(), torch.zeros(2, 4))
    operator = kernels._token_logprobs
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, (*arguments, torch.zeros(2, 3).int()), test_utils=checks)
