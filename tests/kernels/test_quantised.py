"""Matrices of small whole numbers: how far from the true ones they are, and that they are used as what they say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from miniserve.kernels import reference
from miniserve.kernels.native import NativeKernels, Norm, PackedMatrix
from miniserve.kernels.quantised import GROUP, Grid, QuantisedMatrix, in_groups, in_rows

SIZES = [(64, 96), (33, 44), (7, 6), (160, 40)]
ROWS = [0, 1, 3, 8, 9, 16, 17, 33, 64, 100]


def random_weight(in_features: int, out_features: int) -> Tensor:
    """Rows of very different sizes, one of them all zeros."""
    generator = torch.Generator().manual_seed(in_features)
    weight = torch.randn(out_features, in_features, generator=generator)
    weight *= torch.logspace(-3, 1, out_features).unsqueeze(1)
    weight[1] = 0
    return weight.bfloat16()


def grids(weight: Tensor) -> dict[str, Grid]:
    """The matrix in every way that one can be kept in; the last two as files have them."""
    rows, groups = in_rows(weight), in_groups(weight)
    scales = torch.rand(groups.scales.shape, generator=torch.Generator().manual_seed(3)).half()
    return {
        "rows of 8 bits": rows,
        "groups of 4 bits with offsets": groups,
        "groups of 8 bits": Grid(rows.codes, 8, scales),
        "groups of 4 bits": Grid(groups.codes, 4, scales),
    }


GRIDS = tuple(grids(random_weight(64, 8)))


def test_rows_are_quantised_to_the_nearest() -> None:
    weight = random_weight(100, 40)
    grid = in_rows(weight)
    assert ((grid.values - weight.float()).abs() <= 0.5001 * grid.scales.unsqueeze(1)).all()
    assert (grid.codes.int() - 128).abs().amax(dim=1).tolist() == [0 if row == 1 else 127 for row in range(40)]
    assert torch.equal(grid.values[1], torch.zeros(100))


def test_groups_are_quantised_to_the_nearest() -> None:
    weight = random_weight(100, 40)
    grid = in_groups(weight)
    assert grid.codes.max() == 15 and grid.scales.shape == (40, 4)
    steps = grid.scales.float().repeat_interleave(GROUP, dim=1)[:, :100]
    # fp16 offsets and scales are off by a little themselves, which shows where a group's numbers are close together.
    assert ((grid.values - weight.float()).abs() <= 0.51 * steps + 2e-3 * weight.float().abs() + 1e-7).all()
    assert torch.equal(grid.values[1], torch.zeros(100))


def test_what_is_on_the_grid_stays_as_it_is() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (8, 96), generator=generator, dtype=torch.uint8)
    codes[:, ::GROUP], codes[:, 1::GROUP] = 0, 15
    scales, offsets = torch.full((8, 3), 0.125).half(), torch.full((8, 3), -1.0).half()
    values = Grid(codes, 4, scales, offsets).values
    assert torch.equal(in_groups(values).values, values)


@pytest.mark.parametrize(("in_features", "out_features"), SIZES)
@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("num_digits", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_products(
    kernels: NativeKernels, in_features: int, out_features: int, kind: str, num_digits: int, dtype: torch.dtype
) -> None:
    grid = grids(random_weight(in_features, out_features))[kind]
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(out_features, generator=generator)
    norm = Norm(torch.rand(in_features, generator=generator) + 0.5, 1e-5)
    plain = QuantisedMatrix(kernels, grid, bias, dtype=dtype, num_digits=num_digits)
    gated = QuantisedMatrix(kernels, grid, dtype=dtype, num_digits=num_digits, gate=True)
    size = float(grid.values.abs().max())
    for num_rows in ROWS:
        x = torch.randn(num_rows, in_features, generator=generator)
        rounded = x.to(dtype)
        expected = reference.linear_quantised(rounded, grid, bias, num_digits=num_digits)
        torch.testing.assert_close(plain.logits(rounded), expected, atol=1e-5 * size, rtol=1e-5)
        assert torch.equal(plain(rounded), plain.logits(rounded).to(dtype))
        residual = torch.zeros(num_rows, out_features)
        plain.add_to_(residual, rounded)
        assert torch.equal(residual, plain.logits(rounded))
        # Behind the norm, a number near the middle of two digits may fall to either.
        digit = 2.0**-7 if num_digits == 1 else 2.0**-14
        gate, up = reference.linear_quantised(x, grid, None, norm, num_digits=num_digits).chunk(2, dim=-1)
        step = digit * size * in_features**0.5
        slack = step * (1 + gate.abs() + up.abs()) + 2**-7 * (gate * up).abs() + 1e-6
        difference = gated.gate(x, norm).float() - torch.nn.functional.silu(gate) * up
        assert (difference.abs() <= slack).all()


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("num_digits", [1, 2])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no-bias", "bias"])
def test_gates(kernels: NativeKernels, kind: str, num_digits: int, activation: str, with_bias: bool) -> None:
    """Its columns are those of the plain matrix to the bit, so only the activation's own rounding is left."""
    grid = grids(random_weight(100, 90))[kind]
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(90, generator=generator) if with_bias else None
    norm = Norm(torch.rand(100, generator=generator) + 0.5, 1e-5)
    plain = QuantisedMatrix(kernels, grid, bias, dtype=torch.float32, num_digits=num_digits)
    gated = QuantisedMatrix(kernels, grid, bias, dtype=torch.float32, num_digits=num_digits, gate=True)
    down = QuantisedMatrix(kernels, in_rows(random_weight(45, 100)), dtype=torch.float32)
    for num_rows in ROWS:
        x = torch.randn(num_rows, 100, generator=generator)
        gate, up = plain.logits(x, norm).double().chunk(2, dim=-1)  # in fp32 the twin's 1 + tanh(y) has few digits left
        expected = reference.ACTIVATIONS[activation](gate, up).float()
        gates = gated.gate(x, norm, activation)
        torch.testing.assert_close(gates, expected, atol=1e-5, rtol=1e-5)
        residual = x.clone()
        gated.feed_forward_(residual, norm, down, activation)
        assert torch.equal(residual, x + down.logits(gates))


@pytest.mark.parametrize("kind", GRIDS)
def test_two_digits_are_no_worse_than_bf16(kernels: NativeKernels, kind: str) -> None:
    grid = grids(random_weight(160, 96))[kind]
    x = torch.randn(50, 160, generator=torch.Generator().manual_seed(5))
    exact = x @ grid.values.T

    def error(y: Tensor) -> float:
        return float((y - exact).norm() / exact.norm())

    assert error(QuantisedMatrix(kernels, grid).logits(x)) < error(x.bfloat16().float() @ grid.values.T)
    assert error(QuantisedMatrix(kernels, grid, num_digits=1).logits(x)) < 0.02


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("num_digits", [1, 2])
def test_a_row_is_the_same_alone_and_among_others(kernels: NativeKernels, kind: str, num_digits: int) -> None:
    matrix = QuantisedMatrix(kernels, grids(random_weight(100, 90))[kind], num_digits=num_digits)
    x = torch.randn(300, 100, generator=torch.Generator().manual_seed(0))
    gated = QuantisedMatrix(kernels, grids(random_weight(100, 90))[kind], num_digits=num_digits, gate=True)
    whole, gates = matrix.logits(x), gated.gate(x, activation="gelu_tanh")
    for rows in (slice(0, 1), slice(5, 7), slice(41, 57), slice(7, 39), slice(20, 53), slice(256, 300)):
        assert torch.equal(matrix.logits(x[rows].clone()), whole[rows])
        assert torch.equal(gated.gate(x[rows].clone(), activation="gelu_tanh"), gates[rows])


@pytest.mark.parametrize("kind", GRIDS)
def test_a_row_that_is_not_finite_is_not_a_number_and_alone(kernels: NativeKernels, kind: str) -> None:
    matrix = QuantisedMatrix(kernels, grids(random_weight(64, 40))[kind])
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    expected = matrix.logits(x)
    x[1, 3], x[3, 60] = float("nan"), float("-inf")
    logits = matrix.logits(x)
    assert logits[[1, 3]].isnan().all()
    assert torch.equal(logits[[0, 2, 4]], expected[[0, 2, 4]])


@pytest.mark.parametrize(("in_features", "out_features"), SIZES)
@pytest.mark.parametrize("kind", GRIDS)
def test_rows_are_those_of_the_stored_matrix(
    kernels: NativeKernels, in_features: int, out_features: int, kind: str
) -> None:
    grid = grids(random_weight(in_features, out_features))[kind]
    ids = torch.arange(out_features).flip(0)
    assert torch.equal(QuantisedMatrix(kernels, grid).rows(ids), grid.values[ids])
    assert torch.equal(QuantisedMatrix(kernels, grid).rows(ids, 25.3), grid.values[ids] * 25.3)


def test_memory(kernels: NativeKernels) -> None:
    weight = torch.zeros(256, 640, dtype=torch.bfloat16)
    plain = PackedMatrix(kernels, weight).num_bytes
    assert QuantisedMatrix(kernels, in_rows(weight)).num_bytes < 0.51 * plain
    assert QuantisedMatrix(kernels, in_groups(weight)).num_bytes == 5 / 16 * plain
