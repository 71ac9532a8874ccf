"""SwiGLU against its formula: a swapped gate and up would pass every test of shapes."""

from __future__ import annotations

import torch

from miniserve.layers.mlp import MLP


def test_formula() -> None:
    mlp = MLP(6, 10, bias=True, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for parameter in mlp.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    assert mlp.gate_up.weight is not None and mlp.gate_up.bias is not None
    assert mlp.down.weight is not None and mlp.down.bias is not None
    x = torch.randn(4, 6, generator=generator)
    gate = x @ mlp.gate_up.weight[:10].T + mlp.gate_up.bias[:10]
    up = x @ mlp.gate_up.weight[10:].T + mlp.gate_up.bias[10:]
    expected = (gate * torch.sigmoid(gate) * up) @ mlp.down.weight.T + mlp.down.bias
    torch.testing.assert_close(mlp(x), expected, atol=1e-4, rtol=1e-4)
