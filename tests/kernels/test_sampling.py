"""What masks forbid, and the largest of each row: the first of equals, and NaN wherever it stands."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from miniserve.kernels import sampling
from miniserve.kernels.native import NativeKernels


@pytest.mark.parametrize("size", [1, 15, 31, 32, 33, 1000, 5003])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7])
def test_forbid(kernels: NativeKernels, num_rows: int, size: int) -> None:
    """Against bits looked at one by one; forbidden NaN and infinities are gone, and the logits stay as they were."""
    generator = torch.Generator().manual_seed(size)
    padded = torch.randn(num_rows, size + 5, generator=generator)
    padded[padded > 1.5], padded[padded < -1.5] = nan, inf
    logits = padded[:, 2 : size + 2]
    before = logits.clone()
    masks = torch.randint(-(2**31), 2**31, (num_rows, -(-size // 32)), generator=generator).int()
    masks[::2, ::3] = 0
    words = masks.long() & 0xFFFFFFFF
    expected = torch.tensor(
        [
            [logits[row, i] if words[row, i // 32] >> i % 32 & 1 else -inf for i in range(size)]
            for row in range(num_rows)
        ]
    ).reshape(num_rows, size)
    for operators in (kernels, sampling):
        assert torch.equal(operators.forbid(logits, masks).nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("named", "logits", "masks", "out"),
    [
        ("logits", torch.zeros(2, 40).double(), torch.zeros(2, 2).int(), torch.zeros(2, 40)),
        ("masks", torch.zeros(2, 40), torch.zeros(2, 2).long(), torch.zeros(2, 40)),
        ("masks", torch.zeros(2, 40), torch.zeros(2, 1).int(), torch.zeros(2, 40)),
        ("masks", torch.zeros(2, 40), torch.zeros(1, 2).int(), torch.zeros(2, 40)),
        ("out", torch.zeros(2, 40), torch.zeros(2, 2).int(), torch.zeros(2, 41)),
        ("out", torch.zeros(2, 40), torch.zeros(2, 2).int(), torch.zeros(40, 2).T),
    ],
)
def test_what_forbid_refuses(
    kernels: NativeKernels, named: str, logits: torch.Tensor, masks: torch.Tensor, out: torch.Tensor
) -> None:
    with pytest.raises(RuntimeError, match=rf"\b{named}\b"):
        kernels._forbid(logits, masks, out)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 1024, 1025, 5003])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7])
def test_largest(kernels: NativeKernels, num_rows: int, size: int) -> None:
    logits = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size))
    for actual, expected in zip(kernels.largest(logits), sampling.largest(logits), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("first", [0, 1, 15, 16, 1023, 1024, 2047, 2048, 2060])
def test_the_first_of_equals(kernels: NativeKernels, first: int) -> None:
    logits = torch.randn(2, 2061, generator=torch.Generator().manual_seed(0))
    logits[:, [first, *range(first, 2061, 7)]] = 9.0
    ids, values = kernels.largest(logits)
    assert (ids.tolist(), values.tolist()) == ([first] * 2, [9.0] * 2)


def test_equal_rows(kernels: NativeKernels) -> None:
    logits = torch.tensor([[-0.0, 0.0] * 20, [0.0, -0.0] * 20, [-3.0] * 40])
    assert kernels.largest(logits)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("place", [0, 15, 16, 1030, 1999])
def test_nan_anywhere(kernels: NativeKernels, place: int) -> None:
    logits = torch.randn(3, 2000, generator=torch.Generator().manual_seed(0))
    expected = sampling.largest(logits)
    logits[1, place] = nan
    ids, values = kernels.largest(logits)
    assert values[1].isnan() and 0 <= ids[1] < 2000
    assert torch.equal(ids[[0, 2]], expected[0][[0, 2]]) and torch.equal(values[[0, 2]], expected[1][[0, 2]])


def test_infinities(kernels: NativeKernels) -> None:
    logits = torch.full((3, 2000), -inf)
    logits[1, 1500] = -1e30
    logits[2, 1999] = inf
    ids, values = kernels.largest(logits)
    assert (ids.tolist(), values.tolist()) == ([0, 1500, 1999], [-inf, -torch.tensor(1e30).item(), inf])


@pytest.mark.usefixtures("threads_restored")
def test_rows_of_a_padded_vocabulary(kernels: NativeKernels) -> None:
    """What stands behind the row is not looked at; rows are shared among threads."""
    whole = torch.full((9, 300), 100.0)
    logits = whole[:, 20:279]
    logits.copy_(torch.randn(9, 259, generator=torch.Generator().manual_seed(0)))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for actual, expected in zip(kernels.largest(logits), sampling.largest(logits), strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("named", "logits", "ids", "values"),
    [
        ("logits", torch.zeros(2, 5).bfloat16(), torch.zeros(2).long(), torch.zeros(2)),
        ("logits", torch.zeros(5), torch.zeros(1).long(), torch.zeros(1)),
        ("logits", torch.zeros(5, 2).T, torch.zeros(2).long(), torch.zeros(2)),
        ("ids", torch.zeros(2, 5), torch.zeros(2).int(), torch.zeros(2)),
        ("ids", torch.zeros(2, 5), torch.zeros(1).long(), torch.zeros(2)),
        ("ids", torch.zeros(2, 0), torch.zeros(2).long(), torch.zeros(2)),
        ("values", torch.zeros(2, 5), torch.zeros(2).long(), torch.zeros(2).double()),
        ("values", torch.zeros(2, 5), torch.zeros(2).long(), torch.zeros(3)),
    ],
)
def test_what_is_refused(
    kernels: NativeKernels, named: str, logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor
) -> None:
    with pytest.raises(RuntimeError, match=rf"\b{named}\b"):
        kernels._largest_of_rows(logits, ids, values)


def test_tracing(kernels: NativeKernels) -> None:
    arguments = (torch.zeros(2, 5), torch.zeros(2).long(), torch.zeros(2))
    utils = ("test_schema", "test_faketensor")
    masked = (torch.zeros(2, 5), torch.zeros(2, 1).int(), torch.zeros(2, 5))
    torch.library.opcheck(kernels._forbid, masked, test_utils=utils)
    torch.library.opcheck(kernels._largest_of_rows, arguments, test_utils=utils)
