"""SwiGLU against its formula: a swapped gate and up would pass every test of shapes."""

from __future__ import annotations

import pytest
import torch

from miniserve.layers.branch import Branch
from miniserve.layers.linear import can_pack
from miniserve.layers.mlp import MLP, GateUp
from miniserve.layers.norm import RMSNorm


def test_formula() -> None:
    mlp = MLP(6, 10, activation="silu", bias=True, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for parameter in mlp.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    assert mlp.gate_up.weight is not None and mlp.gate_up.bias is not None
    assert mlp.down.weight is not None and mlp.down.bias is not None
    norm = RMSNorm(6, eps=1e-6, device=torch.device("cpu"))
    norm.weight.copy_(torch.randn(6, generator=generator))
    residual = torch.randn(4, 6, generator=generator)
    x = norm(residual, torch.float32)
    gate = x @ mlp.gate_up.weight[:10].T + mlp.gate_up.bias[:10]
    up = x @ mlp.gate_up.weight[10:].T + mlp.gate_up.bias[10:]
    expected = residual + (gate * torch.sigmoid(gate) * up) @ mlp.down.weight.T + mlp.down.bias
    mlp(residual, Branch(norm))
    torch.testing.assert_close(residual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not can_pack(torch.empty(1, 1, dtype=torch.bfloat16)), reason="no bf16 packing on this machine")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 16, 50])
def test_packed_gate_up_is_plain(num_rows: int, bias: bool) -> None:
    gate_up = GateUp(64, 96, activation="silu", bias=bias, dtype=torch.bfloat16, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for parameter in gate_up.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    x = torch.randn(num_rows, 64, generator=generator).bfloat16()
    with torch.inference_mode():
        plain = gate_up(x)
        gate_up.pack()
        packed = gate_up(x)
    assert gate_up.weight is None
    torch.testing.assert_close(packed, plain, atol=0.05, rtol=2**-6)
