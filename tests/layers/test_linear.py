"""The packed linear layer is the plain one, in another layout, and the only copy."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F

from miniserve.layers.linear import Linear, can_pack, parameter

CPU = torch.device("cpu")
NEEDS_PACKING = pytest.mark.skipif(
    not can_pack(torch.empty(1, 1, dtype=torch.bfloat16)), reason="no bf16 packing on this machine"
)


def random_linear(dtype: torch.dtype, *, bias: bool, in_features: int = 96, out_features: int = 80) -> Linear:
    linear = Linear(in_features, out_features, bias=bias, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(0)
    for filled in linear.parameters():
        filled.copy_(torch.randn(filled.shape, generator=generator))
    return linear


@NEEDS_PACKING
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 16, 100])
def test_packed_is_plain(num_rows: int, bias: bool) -> None:
    linear = random_linear(torch.bfloat16, bias=bias)
    weight = linear.weight
    assert weight is not None
    x = torch.randn(num_rows, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = F.linear(x.double(), weight.double(), None if linear.bias is None else linear.bias.double())
    with torch.inference_mode():
        plain = linear(x)
        linear.pack()
        packed = linear(x)
    assert packed.shape == (num_rows, 80) and packed.dtype == torch.bfloat16
    # bf16 keeps 8 bits; near 0 the sum's terms, of size up to 30, set the error.
    torch.testing.assert_close(packed.double(), expected, atol=0.1, rtol=2**-7)
    torch.testing.assert_close(packed, plain, atol=0.1, rtol=2**-7)


@NEEDS_PACKING
def test_packing_leaves_one_copy() -> None:
    linear = random_linear(torch.bfloat16, bias=True)
    plain = weakref.ref(linear.weight)
    linear.pack()
    assert plain() is None
    assert [name for name, _ in linear.named_parameters()] == ["bias"]
    linear.pack()  # again: nothing left to do
    assert linear(torch.zeros(1, 96, dtype=torch.bfloat16)).shape == (1, 80)


def test_only_bf16_is_packed() -> None:
    linear = random_linear(torch.float32, bias=False)
    linear.pack()
    assert linear.weight is not None
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(linear(x), x @ linear.weight.T, atol=1e-4, rtol=1e-4)


def test_parameters_ask_for_no_gradient() -> None:
    assert not parameter(2, 3, dtype=torch.float32, device=CPU).requires_grad
