"""What products refuse by name, and that their schemas say what they write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from miniserve.kernels.native import NativeKernels

PACKED = torch.zeros(96 * 64)  # 80 columns of 50
X, OUT = torch.zeros(3, 50), torch.zeros(3, 80)
WRONG: dict[str, tuple[str, dict[str, object]]] = {
    "x-dtype": ("x", {"x": X.double()}),
    "x-half": ("x", {"x": X.half()}),
    "x-dims": ("x", {"x": torch.zeros(50)}),
    "x-strides": ("x", {"x": torch.zeros(50, 3).T}),
    "x-size": ("packed", {"x": torch.zeros(3, 65)}),
    "packed-small": ("packed", {"packed": PACKED[:-1]}),
    "packed-dtype": ("packed", {"packed": PACKED.half()}),
    "packed-dims": ("packed", {"packed": PACKED.view(96, 64)}),
    "columns": ("packed", {"columns": 97, "out": torch.zeros(3, 97)}),
    "bias-size": ("bias", {"bias": torch.zeros(80)}),
    "bias-dtype": ("bias", {"bias": torch.zeros(96).bfloat16()}),
    "norm-size": ("norm", {"norm": torch.ones(49)}),
    "norm-dtype": ("norm", {"norm": torch.ones(50).bfloat16()}),
    "epilogue": ("epilogue", {"epilogue": "relu"}),
    "activation": ("activation", {"activation": "relu"}),
    "out-rows": ("out", {"out": torch.zeros(2, 80)}),
    "out-columns": ("out", {"out": torch.zeros(3, 79)}),
    "out-of-a-gate": ("out", {"epilogue": "gate"}),
    "out-dtype": ("out", {"out": OUT.half()}),
    "out-strides": ("out", {"out": torch.zeros(80, 3).T}),
}


@pytest.mark.parametrize(("named", "changes"), WRONG.values(), ids=WRONG)
def test_what_linear_refuses(kernels: NativeKernels, named: str, changes: dict[str, object]) -> None:
    right: dict[str, object] = {
        "x": X,
        "packed": PACKED,
        "columns": 80,
        "bias": None,
        "norm": None,
        "eps": 0.0,
        "epilogue": "store",
        "activation": "silu",
        "out": OUT,
    }
    kernels.linear(*right.values())
    with pytest.raises(RuntimeError, match=rf"\b{named}\b"):
        kernels.linear(*{**right, **changes}.values())


RESIDUAL, GATE_UP, DOWN = torch.zeros(3, 50), torch.zeros(96 * 64), torch.zeros(64 * 64)  # 40 between them
WRONG_FEED_FORWARD: dict[str, tuple[str, dict[str, object]]] = {
    "residual-dtype": ("residual", {"residual": RESIDUAL.bfloat16()}),
    "residual-dims": ("residual", {"residual": torch.zeros(50)}),
    "residual-strides": ("residual", {"residual": torch.zeros(50, 3).T}),
    "residual-size": ("gate_up", {"residual": torch.zeros(3, 65)}),
    "gate_up-small": ("gate_up", {"gate_up": GATE_UP[:-1]}),
    "gate_up-dtype": ("gate_up", {"gate_up": GATE_UP.half(), "down": DOWN.half()}),
    "gate_up-bias": ("gate_up_bias", {"gate_up_bias": torch.zeros(80)}),
    "down-small": ("down", {"down": DOWN[:-1]}),
    "down-dtype": ("down", {"down": DOWN.bfloat16()}),
    "down-bias": ("down_bias", {"down_bias": torch.zeros(50)}),
    "intermediate": ("gate_up", {"intermediate": 49}),
    "norm-size": ("norm", {"norm": torch.ones(49)}),
    "activation": ("activation", {"activation": "relu"}),
}


@pytest.mark.parametrize(("named", "changes"), WRONG_FEED_FORWARD.values(), ids=WRONG_FEED_FORWARD)
def test_what_feed_forward_refuses(kernels: NativeKernels, named: str, changes: dict[str, object]) -> None:
    right: dict[str, object] = {
        "residual": RESIDUAL,
        "gate_up": GATE_UP,
        "gate_up_bias": None,
        "down": DOWN,
        "down_bias": None,
        "intermediate": 40,
        "norm": None,
        "eps": 0.0,
        "activation": "silu",
    }
    kernels.feed_forward(*right.values())
    with pytest.raises(RuntimeError, match=rf"\b{named}\b"):
        kernels.feed_forward(*{**right, **changes}.values())


@pytest.mark.parametrize(
    ("named", "weight", "packed"),
    [
        ("weight", torch.zeros(80), PACKED),
        ("weight", torch.zeros(80, 50).bfloat16(), PACKED),
        ("weight", torch.zeros(50, 80).T, PACKED),
        ("packed", torch.zeros(97, 50), PACKED),
    ],
)
def test_what_pack_refuses(kernels: NativeKernels, named: str, weight: Tensor, packed: Tensor) -> None:
    with pytest.raises(RuntimeError, match=rf"\b{named}\b"):
        kernels.pack(weight, packed)


@pytest.mark.parametrize(
    ("named", "ids", "out"),
    [
        ("ids", torch.tensor([80]), torch.zeros(1, 50)),
        ("ids", torch.tensor([0, -1]), torch.zeros(2, 50)),
        ("ids", torch.tensor([0], dtype=torch.int32), torch.zeros(1, 50)),
        ("out", torch.tensor([0]), torch.zeros(2, 50)),
        ("out", torch.tensor([0]), torch.zeros(1, 50).bfloat16()),
        ("packed", torch.tensor([0]), torch.zeros(1, 65)),
    ],
)
def test_what_unpack_refuses(kernels: NativeKernels, named: str, ids: Tensor, out: Tensor) -> None:
    with pytest.raises(RuntimeError, match=rf"\b{named}\b"):
        kernels.unpack_columns(PACKED, 80, ids, 1.0, out)


def test_tracing(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """The schemas say what is written, and the fakes run where there is no data."""
    weight, x = torch.randn(80, 50).to(dtype), torch.randn(3, 50).to(dtype)
    packed = torch.zeros(96 * 64, dtype=dtype)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels.pack, (weight, packed), test_utils=checks)
    linear = (x, packed, 80, None, None, 0.0, "store", "silu", torch.zeros(3, 80))
    torch.library.opcheck(kernels.linear, linear, test_utils=checks)
    halves = (torch.zeros(96 * 64, dtype=dtype), None, torch.zeros(64 * 64, dtype=dtype), None)
    torch.library.opcheck(kernels.feed_forward, (torch.zeros(3, 50), *halves, 40, None, 0.0, "silu"), test_utils=checks)
    unpack = (packed, 80, torch.tensor([3, 7]), 1.0, torch.zeros(2, 50))
    torch.library.opcheck(kernels.unpack_columns, unpack, test_utils=checks)
