"""Layers with the compiled kernels are the layers without them; the plain weight is gone."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from miniserve.attention.base import LayerKVCache
from miniserve.attention.native import NativeBackend
from miniserve.attention.sdpa import SdpaBackend
from miniserve.kernels.native import NativeKernels
from miniserve.layers.attention import Attention, AttentionShape, QKNorm
from miniserve.layers.branch import Branch
from miniserve.layers.embedding import TokenMatrix
from miniserve.layers.linear import Linear
from miniserve.layers.mlp import MLP
from miniserve.layers.norm import RMSNorm
from miniserve.layers.rotary import RopeConfig, RotaryEmbedding
from miniserve.models.transformer import Transformer
from tests.attention.steps import make_step
from tests.runner.tiny import CONFIG

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
HIDDEN = 40


def fill(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def random_norm(size: int) -> RMSNorm:
    norm = RMSNorm(size, eps=1e-5, device=CPU)
    norm.weight.copy_(1 + 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(1)))
    return norm


def hidden(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(2))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = 5e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
def test_linear(native_kernels: NativeKernels, dtype: torch.dtype, bias: bool) -> None:
    linear = Linear(HIDDEN, 24, bias=bias, dtype=dtype, device=CPU)
    fill(linear)
    norm, x = random_norm(HIDDEN), hidden(5)
    plain = linear(x, norm), linear(x.to(dtype)), torch.ones(5, 24)
    linear.add_to_(plain[2], x.to(dtype))
    weight = weakref.ref(linear.weight)
    linear.pack(native_kernels)
    assert weight() is None
    native = linear(x, norm), linear(x.to(dtype)), torch.ones(5, 24)
    linear.add_to_(native[2], x.to(dtype))
    for actual, expected in zip(native, plain, strict=True):
        assert actual.dtype == expected.dtype
        assert_close(actual, expected, dtype)
    linear.pack(native_kernels)  # again: nothing left to do
    assert torch.equal(linear(x, norm), native[0])


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
def test_mlp(native_kernels: NativeKernels, dtype: torch.dtype, bias: bool) -> None:
    mlp = MLP(HIDDEN, 56, activation="silu", bias=bias, dtype=dtype, device=CPU)
    fill(mlp)
    branch, expected, residual = Branch(random_norm(HIDDEN)), hidden(5), hidden(5)
    mlp(expected, branch)
    mlp.gate_up.pack(native_kernels)
    mlp.down.pack(native_kernels)
    mlp(residual, branch)
    assert_close(residual, expected, dtype)


@DTYPES
@pytest.mark.parametrize("qk_norm", ["none", "heads", "projection"])
def test_attention(native_kernels: NativeKernels, dtype: torch.dtype, qk_norm: QKNorm) -> None:
    shape = AttentionShape(
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        qkv_bias=True,
        o_bias=False,
        qk_norm=qk_norm,
        qk_norm_eps=1e-5,
        scale=0.25,
        window=None,
        soft_cap=0.0,
        sinks=False,
    )
    attention = Attention(HIDDEN, shape, dtype=dtype, device=CPU)
    fill(attention)
    norm, metadata = random_norm(HIDDEN), make_step([(6, 6), (3, 3)], block_size=32).metadata
    rope = RotaryEmbedding(RopeConfig(), 16, 64, device=CPU)(torch.tensor([*range(6), *range(3)]))
    results = []
    for backend in (SdpaBackend(dtype), NativeBackend(dtype, native_kernels)):
        cache = LayerKVCache(torch.zeros(backend.cache_shape(8, 32, 2, 16), dtype=dtype))
        residual = hidden(9)
        attention(residual, Branch(norm), rope, backend.plan(metadata), cache)
        results.append(residual)
    assert_close(results[1], results[0], dtype)


@DTYPES
def test_token_matrix(native_kernels: NativeKernels, dtype: torch.dtype) -> None:
    matrix = TokenMatrix(70, HIDDEN, dtype=dtype, device=CPU)
    fill(matrix)
    ids, norm, x = torch.tensor([0, 69, 33, 0]), random_norm(HIDDEN), hidden(3)
    rows, logits = matrix.embed(ids, 3.0), matrix.logits(x, norm)
    matrix.pack(None)
    assert matrix.weight is not None, "rows of it are looked up: without kernels it stays plain"
    matrix.pack(native_kernels)
    assert matrix.weight is None
    assert torch.equal(matrix.embed(ids, 3.0), rows)
    assert_close(matrix.logits(x, norm), logits, dtype)
    assert matrix.logits(x, norm).dtype == torch.float32


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_keeps_no_plain_matrix_that_it_multiplies_with(native_kernels: NativeKernels, tied: bool) -> None:
    """An embedding that is the head too is kept once; one that is only looked up stays plain."""
    config = replace(CONFIG, tie_word_embeddings=tied)
    model = Transformer(config, max_positions=64, dtype=torch.bfloat16, device=CPU)
    fill(model)
    for name in model.packed_modules():
        model.pack(name, native_kernels)
    matrices = [name for name, parameter in model.named_parameters() if parameter.ndim > 1]
    assert matrices == []
