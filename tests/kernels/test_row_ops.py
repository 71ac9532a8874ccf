"""Norms of rows and sums with the residual stream, against their twins."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest
import torch
from torch import Tensor

from miniserve.kernels import reference
from miniserve.kernels.native import NativeKernels, Norm

SIZES = (1, 7, 16, 33, 64, 100)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_norm(size: int) -> Norm:
    return Norm(1 + 0.3 * randn(size, seed=2), 1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_add(kernels: NativeKernels, x_dtype: torch.dtype, with_norm: bool, size: int) -> None:
    norm = random_norm(size) if with_norm else None
    for num_rows in (0, 1, 5, 40):
        residual, x = randn(num_rows, size), randn(num_rows, size, seed=1).to(x_dtype)
        expected = reference.add(residual, x, norm, 0.3)
        kernels.add_(residual, x, norm, 0.3)
        torch.testing.assert_close(residual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("first", [0, 3, 32])
def test_normalise(kernels: NativeKernels, dtype: torch.dtype, size: int, first: int) -> None:
    """The columns before and behind stay as they are."""
    norm = random_norm(size)
    for num_rows in (0, 1, 5, 40):
        before = randn(num_rows, first + size + 5).to(dtype)
        x = before.clone()
        kernels.normalise_(x, first, norm)
        columns = slice(first, first + size)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        expected = reference.rms_norm(before[:, columns], norm).to(dtype)
        torch.testing.assert_close(x[:, columns], expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(x[:, :first], before[:, :first])
        assert torch.equal(x[:, first + size :], before[:, first + size :])


def test_add_without_a_factor_is_plain(kernels: NativeKernels, dtype: torch.dtype) -> None:
    residual, x = randn(5, 100), randn(5, 100, seed=1).to(dtype)
    expected = residual + x.float()
    kernels.add_(residual, x)
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_nan_stays_in_its_row(kernels: NativeKernels, x_dtype: torch.dtype) -> None:
    norm, x = random_norm(33), randn(5, 33).to(x_dtype)
    x[3, 32] = nan
    residual = torch.zeros(5, 33)
    kernels.add_(residual, x, norm)
    kernels.normalise_(x, 0, norm)
    for rows in (residual, x):
        assert rows[3].isnan().all() and not rows[[0, 1, 2, 4]].isnan().any()


def test_eps_counts_where_rows_are_small(kernels: NativeKernels) -> None:
    norm, x, residual = Norm(torch.ones(8), 1e-2), torch.full((1, 8), 1e-3), torch.zeros(1, 8)
    kernels.add_(residual, x, norm)
    kernels.normalise_(x, 0, norm)
    expected = torch.full((1, 8), 1e-3 / (1e-6 + 1e-2) ** 0.5)
    torch.testing.assert_close(residual, expected)
    torch.testing.assert_close(x, expected)


@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_computed_by_itself(kernels: NativeKernels, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    norm, residual, x = random_norm(100), randn(40, 100), randn(40, 100, seed=1).to(dtype)
    together, normalised = residual.clone(), x.clone()
    kernels.add_(together, x, norm, 0.3)
    kernels.normalise_(normalised, 0, norm)
    for row in range(40):
        alone, own = residual[row : row + 1].clone(), x[row : row + 1].clone()
        kernels.add_(alone, x[row : row + 1], norm, 0.3)
        kernels.normalise_(own, 0, norm)
        assert torch.equal(alone[0], together[row]) and torch.equal(own[0], normalised[row])


X = torch.zeros(3, 50)
WRONG: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "add-residual-dtype": ("_add", "residual", (X.bfloat16(), X, None, 0.0, 1.0)),
    "add-rows": ("_add", "x", (X, torch.zeros(2, 50), None, 0.0, 1.0)),
    "add-columns": ("_add", "x", (X, torch.zeros(3, 49), None, 0.0, 1.0)),
    "add-dtype": ("_add", "x", (X, X.half(), None, 0.0, 1.0)),
    "add-norm": ("_add", "norm", (X, X, torch.ones(49), 0.0, 1.0)),
    "normalise-dtype": ("_normalise", "x", (X.half(), 0, torch.ones(50), 0.0)),
    "normalise-beyond": ("_normalise", "x", (X, 1, torch.ones(50), 0.0)),
    "normalise-before": ("_normalise", "x", (X, -1, torch.ones(50), 0.0)),
    "normalise-norm": ("_normalise", "norm", (X, 0, torch.ones(50).bfloat16(), 0.0)),
    "normalise-strides": ("_normalise", "x", (X.T, 0, torch.ones(3), 0.0)),
}


@pytest.mark.parametrize(("operator", "named", "arguments"), WRONG.values(), ids=WRONG)
def test_what_is_refused(kernels: NativeKernels, operator: str, named: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(RuntimeError, match=rf"\b{named}\b"):
        getattr(kernels, operator)(*arguments)


def test_tracing(kernels: NativeKernels) -> None:
    """The schemas say what is written, and the fakes run where there is no data."""
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels._add, (randn(3, 50), randn(3, 50), None, 0.0, 1.0), test_utils=checks)
    torch.library.opcheck(kernels._normalise, (randn(3, 50), 0, torch.ones(50), 1e-5), test_utils=checks)
