"""Products against their twins, and that a row's result is its own: alone, among others, on any number of threads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import nan

import pytest
import torch
from torch import Tensor

from miniserve.kernels import reference
from miniserve.kernels.native import NativeKernels, Norm, PackedMatrix
from miniserve.kernels.quantised import QuantisedMatrix, in_rows

# (in_features, out_features): whole chunks, none, less than one, more than one.
SIZES = [(64, 96), (33, 45), (100, 80), (7, 5), (160, 17)]
ROWS = [0, 1, 3, 16, 17, 33, 64, 100]
with_sizes = pytest.mark.parametrize(("in_features", "out_features"), SIZES)
with_norm = pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "norm"])
with_activation = pytest.mark.parametrize("activation", reference.ACTIVATIONS)
with_bias = pytest.mark.parametrize("with_bias", [False, True], ids=["no-bias", "bias"])


@dataclass(frozen=True)
class Case:
    """A matrix, and rows for it: fp32 where a norm stands in front, as the residual stream is."""

    weight: Tensor
    bias: Tensor | None
    norm: Norm | None
    x: Tensor

    def matrix(self, kernels: NativeKernels, *, gate: bool = False) -> PackedMatrix:
        return PackedMatrix(kernels, self.weight, self.bias, gate=gate)


def make_case(
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    *,
    with_norm: bool = False,
    with_bias: bool = False,
    num_rows: int = max(ROWS),
) -> Case:
    generator = torch.Generator().manual_seed(in_features)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return Case(
        weight=(randn(out_features, in_features) * in_features**-0.5).to(dtype),
        bias=randn(out_features).to(dtype) if with_bias else None,
        norm=Norm(1.0 + 0.3 * randn(in_features), 1e-5) if with_norm else None,
        x=3.0 * randn(num_rows, in_features) if with_norm else randn(num_rows, in_features).to(dtype),
    )


def assert_close(actual: Tensor, expected: Tensor, case: Case) -> None:
    """Sums of the same numbers in another order. After a norm, some of the left side are rounded to the other bf16."""
    rounded = case.weight.dtype == torch.bfloat16
    atol = 1e-2 if rounded and case.norm is not None else 1e-5
    rtol = 2**-8 if actual.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.float(), expected.to(torch.float32), atol=atol, rtol=rtol)


@with_sizes
@with_norm
@with_bias
def test_store_and_logits(
    kernels: NativeKernels, dtype: torch.dtype, in_features: int, out_features: int, with_norm: bool, with_bias: bool
) -> None:
    case = make_case(in_features, out_features, dtype, with_norm=with_norm, with_bias=with_bias)
    matrix = case.matrix(kernels)
    for num_rows in ROWS:
        x = case.x[:num_rows]
        expected = reference.linear(x, case.weight, case.bias, case.norm)
        stored, logits = matrix(x, case.norm), matrix.logits(x, case.norm)
        assert (stored.shape, stored.dtype) == ((num_rows, out_features), dtype)
        assert (logits.shape, logits.dtype) == ((num_rows, out_features), torch.float32)
        assert_close(stored, expected, case)
        assert_close(logits, expected, case)
        assert torch.equal(logits.to(dtype), stored)


@with_sizes
@with_bias
def test_add(kernels: NativeKernels, dtype: torch.dtype, in_features: int, out_features: int, with_bias: bool) -> None:
    """A stride that is wrong would write into a neighbour's row: sizes that are no multiple of a tile show it."""
    case = make_case(in_features, out_features, dtype, with_bias=with_bias)
    matrix = case.matrix(kernels)
    for num_rows in ROWS:
        before = torch.randn(num_rows, out_features, generator=torch.Generator().manual_seed(1))
        residual = before.clone()
        matrix.add_to_(residual, case.x[:num_rows])
        assert_close(residual, before + reference.linear(case.x[:num_rows], case.weight, case.bias), case)
        assert torch.equal(residual, before + matrix.logits(case.x[:num_rows]))


@pytest.mark.parametrize(("in_features", "half"), [(64, 96), (33, 40), (100, 17), (7, 5), (40, 33)])
@with_activation
@with_norm
@with_bias
def test_gate(
    kernels: NativeKernels,
    dtype: torch.dtype,
    in_features: int,
    half: int,
    with_norm: bool,
    with_bias: bool,
    activation: str,
) -> None:
    case = make_case(in_features, 2 * half, dtype, with_norm=with_norm, with_bias=with_bias)
    matrix = case.matrix(kernels, gate=True)
    for num_rows in ROWS:
        x = case.x[:num_rows]
        gated = matrix.gate(x, case.norm, activation)
        assert (gated.shape, gated.dtype) == ((num_rows, half), dtype)
        assert_close(gated, reference.gate(x, case.weight, case.bias, case.norm, activation=activation), case)


@with_activation
def test_gate_far_from_zero(kernels: NativeKernels, activation: str) -> None:
    """exp neither overflows nor underflows into something else: silu(x) is x on the right, and 0 on the left."""
    x = torch.tensor([[-1e4], [-100.0], [-20.0], [-7.0], [-3.0], [0.0], [0.1], [7.0], [20.0], [100.0], [1e4]])
    matrix = PackedMatrix(kernels, torch.ones(2, 1), gate=True)
    expected = reference.ACTIVATIONS[activation](x, x)
    torch.testing.assert_close(matrix.gate(x, activation=activation), expected, atol=1e-5, rtol=1e-5)


@with_activation
def test_a_gate_hides_no_nan(kernels: NativeKernels, activation: str) -> None:
    matrix = PackedMatrix(kernels, torch.ones(2, 1), gate=True)
    assert bool(matrix.gate(torch.tensor([[math.nan]]), activation=activation).isnan().all())


@pytest.mark.parametrize(("size", "intermediate"), [(64, 96), (33, 40), (50, 17), (7, 5), (40, 33), (160, 64)])
@with_activation
@with_bias
def test_feed_forward_is_its_two_products(
    kernels: NativeKernels, dtype: torch.dtype, size: int, intermediate: int, with_bias: bool, activation: str
) -> None:
    """Bit for bit, and its twin; some sizes leave columns of a row tile empty."""
    first = make_case(size, 2 * intermediate, dtype, with_norm=True, with_bias=with_bias)
    second = make_case(intermediate, size, dtype, with_bias=with_bias)
    assert first.norm is not None
    gate_up, down = first.matrix(kernels, gate=True), second.matrix(kernels)
    for num_rows in ROWS:
        residual, expected = first.x[:num_rows].clone(), first.x[:num_rows].clone()
        twin = reference.feed_forward(
            residual,
            first.weight,
            second.weight,
            first.norm,
            gate_up_bias=first.bias,
            down_bias=second.bias,
            activation=activation,
        )
        gate_up.feed_forward_(residual, first.norm, down, activation)
        down.add_to_(expected, gate_up.gate(expected, first.norm, activation))
        assert torch.equal(residual, expected)
        assert_close(residual, twin, first)


def test_feed_forward_with_another_kind_of_matrix(kernels: NativeKernels) -> None:
    """Then it is two calls."""
    first, second = make_case(64, 64, torch.bfloat16, with_norm=True), make_case(32, 64, torch.bfloat16)
    assert first.norm is not None
    gate_up = first.matrix(kernels, gate=True)
    down = QuantisedMatrix(kernels, in_rows(second.weight))
    residual, expected = first.x.clone(), first.x.clone()
    gate_up.feed_forward_(residual, first.norm, down)
    down.add_to_(expected, gate_up.gate(expected, first.norm))
    assert torch.equal(residual, expected)


def test_fp32_input_of_a_bf16_matrix_needs_no_norm(kernels: NativeKernels) -> None:
    case = make_case(64, 48, torch.bfloat16, num_rows=5)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    assert_close(case.matrix(kernels).logits(x), reference.linear(x, case.weight), case)


def test_norm_of_bf16_rows(kernels: NativeKernels) -> None:
    case = make_case(100, 48, torch.bfloat16, with_norm=True, num_rows=20)
    x = case.x.bfloat16()
    assert_close(case.matrix(kernels).logits(x, case.norm), reference.linear(x, case.weight, None, case.norm), case)


def test_eps_counts_where_the_input_is_small(kernels: NativeKernels) -> None:
    norm = Norm(torch.ones(8), 1e-2)
    x = torch.full((1, 8), 1e-3)
    expected = torch.full((1, 8), 1e-3 / (1e-6 + 1e-2) ** 0.5)
    torch.testing.assert_close(PackedMatrix(kernels, torch.eye(8)).logits(x, norm), expected)
    assert torch.equal(PackedMatrix(kernels, torch.eye(8)).logits(torch.zeros(1, 8), norm), torch.zeros(1, 8))


@with_sizes
def test_rows_are_those_of_the_plain_matrix(
    kernels: NativeKernels, dtype: torch.dtype, in_features: int, out_features: int
) -> None:
    case = make_case(in_features, out_features, dtype)
    matrix = case.matrix(kernels)
    ids = torch.randint(0, out_features, (50,), generator=torch.Generator().manual_seed(0))
    ids[:3] = torch.tensor([0, out_features - 1, 0])
    for chosen in (ids, ids[:1], ids[:0], torch.arange(out_features)):
        assert torch.equal(matrix.rows(chosen), case.weight[chosen].float())
        assert torch.equal(matrix.rows(chosen, 25.3), case.weight[chosen].float() * 25.3)


def test_a_matrix_that_is_not_contiguous(kernels: NativeKernels, dtype: torch.dtype) -> None:
    weight = make_case(40, 60, dtype).weight.T
    assert torch.equal(PackedMatrix(kernels, weight).rows(torch.arange(40)), weight.float())


def test_memory_is_that_of_the_matrix(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """In whole chunks, and what is fetched ahead: one copy, not two."""
    plain = 256 * 320 * dtype.itemsize
    matrix = PackedMatrix(kernels, torch.zeros(256, 320, dtype=dtype))
    assert plain <= matrix.num_bytes < 1.2 * plain


# --- a row is computed by itself ---


def every_product(case: Case, kernels: NativeKernels, x: Tensor) -> list[Tensor]:
    """What each product gives for rows `x`, a row each."""
    residual = torch.ones(len(x), case.weight.shape[0])
    case.matrix(kernels).add_to_(residual, x)
    plain, gated = case.matrix(kernels), case.matrix(kernels, gate=True)
    down = PackedMatrix(kernels, case.weight.T[:, : case.weight.shape[0] // 2])
    stream = x.float().clone()
    gated.feed_forward_(stream, case.norm or Norm(torch.ones(x.shape[1]), 1e-5), down)
    return [plain(x, case.norm), plain.logits(x, case.norm), gated.gate(x, case.norm), residual, stream]


@pytest.mark.usefixtures("threads_restored")
@with_norm
def test_a_row_is_the_same_alone_and_among_any_number(
    kernels: NativeKernels, dtype: torch.dtype, with_norm: bool
) -> None:
    """Bit for bit, on one thread and on more: what makes an answer the same alone and in a batch."""
    case = make_case(100, 90, dtype, with_norm=with_norm, with_bias=True)
    torch.set_num_threads(1)
    whole = every_product(case, kernels, case.x)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (
            slice(0, 100),
            slice(0, 1),
            slice(41, 42),
            slice(7, 10),
            slice(20, 36),
            slice(3, 20),
            slice(30, 95),
        ):
            for one, all_rows in zip(every_product(case, kernels, case.x[rows].clone()), whole, strict=True):
                assert torch.equal(one, all_rows[rows]), (threads, rows)


@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize("num_rows", [300, 521])
@with_norm
def test_rows_of_a_long_prompt_are_computed_in_parts(
    kernels: NativeKernels, dtype: torch.dtype, num_rows: int, with_norm: bool
) -> None:
    """A block for each thread, and more rows than threads lay out at once; the last part is less than a tile."""
    case = make_case(40, 50, dtype, with_norm=with_norm, with_bias=True, num_rows=num_rows)
    torch.set_num_threads(2)
    last = every_product(case, kernels, case.x[-21:].clone())
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for one, all_rows in zip(last, every_product(case, kernels, case.x), strict=True):
            assert torch.equal(one, all_rows[-21:]), threads


@with_norm
def test_nan_stays_in_its_row_and_does_not_get_lost(
    kernels: NativeKernels, dtype: torch.dtype, with_norm: bool
) -> None:
    case = make_case(100, 90, dtype, with_norm=with_norm, num_rows=40)
    clean = every_product(case, kernels, case.x)
    x = case.x.clone()
    x[5, 99], x[20, 0], x[39, 50] = nan, nan, nan
    broken = torch.zeros(40, dtype=torch.bool)
    broken[[5, 20, 39]] = True
    for after, before in zip(every_product(case, kernels, x), clean, strict=True):
        assert after[broken].isnan().all()
        assert torch.equal(after[~broken], before[~broken])
