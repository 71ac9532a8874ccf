"""Matrices that are kept as int8: how far they are from the true ones, and that they are used as what they hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from miniserve.kernels import reference
from miniserve.kernels.native import NativeKernels, Norm, PackedMatrix, quantise_rows

SIZES = [(64, 96), (33, 44), (7, 6)]
ROWS = [0, 1, 3, 16, 17, 33, 64, 100]


def random_weight(in_features: int, out_features: int) -> Tensor:
    """Rows of very different sizes, one of them all zeros."""
    generator = torch.Generator().manual_seed(in_features)
    weight = torch.randn(out_features, in_features, generator=generator)
    weight *= torch.logspace(-3, 1, out_features).unsqueeze(1)
    weight[1] = 0
    return weight.bfloat16()


def stored(weight: Tensor) -> Tensor:
    """The matrix that the int8 one stands for, fp32."""
    quantised, scales = quantise_rows(weight)
    return quantised.float() * scales.unsqueeze(1)


def test_quantised_to_the_nearest() -> None:
    weight = random_weight(100, 40)
    quantised, scales = quantise_rows(weight)
    assert quantised.dtype == torch.int8 and scales.dtype == torch.float32
    assert ((stored(weight) - weight.float()).abs() <= 0.5001 * scales.unsqueeze(1)).all()
    assert quantised.abs().amax(dim=1).tolist() == [0 if row == 1 else 127 for row in range(40)]
    assert torch.equal(stored(weight)[1], torch.zeros(100))


@pytest.mark.parametrize(("in_features", "out_features"), SIZES)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no-bias", "bias"])
def test_products(kernels: NativeKernels, in_features: int, out_features: int, with_bias: bool) -> None:
    weight = random_weight(in_features, out_features)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(out_features, generator=generator) if with_bias else None
    norm = Norm(torch.rand(in_features, generator=generator) + 0.5, 1e-5)
    plain = PackedMatrix(kernels, weight, bias, int8=True)
    gated = PackedMatrix(kernels, weight, bias, gate=True, int8=True)
    for num_rows in ROWS:
        x = torch.randn(num_rows, in_features, generator=generator)
        atol = 5e-2 * float(weight.abs().max())  # x is rounded to bf16 behind the norm, and some of it differently
        rounded = x.bfloat16()
        expected = reference.linear(rounded, stored(weight), bias)
        torch.testing.assert_close(plain.logits(rounded), expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(plain(rounded), plain.logits(rounded).bfloat16())
        residual = torch.zeros(num_rows, out_features)
        plain.add_to_(residual, rounded)
        assert torch.equal(residual, plain.logits(rounded))
        normed = reference.silu_gate(x, stored(weight), bias, norm)
        torch.testing.assert_close(gated.silu_gate(x, norm).float(), normed, atol=atol, rtol=2**-7)


def test_a_row_is_the_same_alone_and_among_others(kernels: NativeKernels) -> None:
    """Chunks are widened one by one for few rows, and a whole panel at once for many: to the same numbers."""
    matrix = PackedMatrix(kernels, random_weight(100, 90), int8=True)
    x = torch.randn(300, 100, generator=torch.Generator().manual_seed(0))
    whole = matrix.logits(x)
    for rows in (slice(0, 1), slice(41, 57), slice(7, 39), slice(20, 53), slice(256, 300)):
        assert torch.equal(matrix.logits(x[rows].clone()), whole[rows])


@pytest.mark.parametrize(("in_features", "out_features"), SIZES)
def test_rows_are_those_of_the_stored_matrix(kernels: NativeKernels, in_features: int, out_features: int) -> None:
    weight = random_weight(in_features, out_features)
    ids = torch.arange(out_features).flip(0)
    assert torch.equal(PackedMatrix(kernels, weight, int8=True).rows(ids), stored(weight)[ids])


def test_half_the_memory(kernels: NativeKernels) -> None:
    weight = torch.zeros(256, 640, dtype=torch.bfloat16)
    assert PackedMatrix(kernels, weight, int8=True).num_bytes < 0.6 * PackedMatrix(kernels, weight).num_bytes
