"""RMSNorm against its formula, in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from miniserve.layers.norm import RMSNorm

CPU = torch.device("cpu")


def random_norm(size: int, eps: float = 1e-6) -> RMSNorm:
    norm = RMSNorm(size, eps=eps, device=CPU)
    norm.weight.copy_(torch.randn(size, generator=torch.Generator().manual_seed(1)))
    return norm


def formula(norm: RMSNorm, x: Tensor) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


@pytest.mark.parametrize("shape", [(5, 32), (3, 4, 16), (0, 32)])
def test_formula(shape: tuple[int, ...]) -> None:
    norm, x = random_norm(shape[-1]), torch.randn(shape, generator=torch.Generator().manual_seed(2))
    output = norm(x, torch.float32)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), formula(norm, x), atol=1e-6, rtol=1e-6)


def test_bf16_is_rounded_once() -> None:
    """Computed in fp32, weight included: the result is the rounded true one."""
    norm, x = random_norm(64), torch.randn(8, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    output = norm(x, torch.bfloat16)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), formula(norm, x), atol=0, rtol=2**-8)


def test_eps_counts_where_the_input_is_small() -> None:
    norm = random_norm(8, eps=1e-2)
    x = torch.full((1, 8), 1e-3)
    torch.testing.assert_close(norm(x, torch.float32), norm.weight[None] * 1e-3 / (1e-6 + 1e-2) ** 0.5)
    assert torch.equal(norm(torch.zeros(1, 8), torch.float32), torch.zeros(1, 8))


def test_large_inputs_do_not_overflow() -> None:
    """Bug: squared in fp16, an activation of 300 is infinite already."""
    norm = random_norm(8)
    x = torch.full((1, 8), 3e4, dtype=torch.float16)
    torch.testing.assert_close(norm(x, torch.float32), norm.weight[None].detach(), atol=1e-5, rtol=1e-5)
