"""y = x W^T + b, with the weight in the layout that the device multiplies fastest.

A layer's products come with what stands before or behind them in a transformer, the norm and the sum with the residual
stream: the compiled kernels do both in one pass. Without kernels, PyTorch's bf16 linear on a CPU re-lays the weight out
at every call; `pack` does that once, with the oneDNN operators that PyTorch's own compiler uses for frozen weights. The
plain weight is dropped: there is one copy in memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from miniserve.kernels.native import Matrix, NativeKernels, PackedMatrix
from miniserve.kernels.quantised import Grid, QuantisedMatrix, Scheme
from miniserve.layers.norm import RMSNorm

# The row count oneDNN is told to expect when it picks a layout; any other count runs on the same layout.
_EXPECTED_ROWS = 16


class Linear(nn.Module):
    """A linear layer without training. `weight` [out_features, in_features] until `pack` replaces it.

    Attributes:
        may_be_small: whether a scheme may make the weight small: False where it is small and decides much.
    """

    weight: nn.Parameter | None
    may_be_small = True

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self.weight = parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = parameter(out_features, dtype=dtype, device=device) if bias else None
        self._native: Matrix | None = None
        self._packed: Tensor | None = None  # oneDNN's opaque layout

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """norm(x) W^T + b.

        Args:
            x: [num_tokens, in_features], in the layer's dtype, or the fp32 residual stream.
            norm: applied to x before.

        Returns:
            [num_tokens, out_features] in the layer's dtype.
        """
        if self._native is not None:
            return self._native(x, None if norm is None else norm.native)
        return self._product(self._normalised(x, norm))

    def add_to_(self, residual: Tensor, x: Tensor) -> None:
        """residual += x W^T + b, for residual fp32 [num_tokens, out_features] and x [num_tokens, in_features]."""
        if self._native is not None:
            self._native.add_to_(residual, x)
        else:
            residual += self._product(x)

    def pack(
        self, kernels: NativeKernels | None = None, scheme: Scheme | None = None, grid: Grid | None = None
    ) -> None:
        """Swap the loaded weight for the layout that is fastest: the kernels', else oneDNN's, else as it is.

        The kernels can keep it as small whole numbers: as `scheme` makes them, or those of `grid`.
        """
        if self.weight is None:
            return
        if kernels is not None:
            self._native = self._matrix(kernels, self.weight.data, scheme, grid)
            self.weight = None
        elif can_pack(self.weight):
            self._pack_for_onednn(self.weight.data)
            self.weight = None

    def _matrix(self, kernels: NativeKernels, weight: Tensor, scheme: Scheme | None, grid: Grid | None) -> Matrix:
        bias = None if self.bias is None else self.bias.data
        if scheme is None:
            return PackedMatrix(kernels, weight, bias, gate=self._is_gate)
        grid = scheme.grid(weight) if grid is None else grid
        return QuantisedMatrix(kernels, grid, bias, dtype=self.dtype, num_digits=scheme.num_digits, gate=self._is_gate)

    @property
    def native(self) -> Matrix | None:
        """The weight in the kernels' layout, where they multiply."""
        return self._native

    @property
    def num_bytes(self) -> int:
        """Memory of the weight, in whatever layout it is."""
        if self._native is not None:
            return self._native.num_bytes
        return self.out_features * self.in_features * self.dtype.itemsize

    _is_gate = False

    def _pack_for_onednn(self, weight: Tensor) -> None:
        self._packed = pack_weight(weight)

    def _normalised(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        return x.to(self.dtype) if norm is None else norm(x, self.dtype)

    def _product(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return packed_linear(x, self._packed, self.bias)
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)


def can_pack(weight: Tensor) -> bool:
    """Whether packing exists and pays: bf16 on a CPU, in a PyTorch built with oneDNN that has these operators."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return all(hasattr(torch.ops.mkldnn, name) for name in names) and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack_weight(weight: Tensor) -> Tensor:
    """`weight` [out_features, in_features] in oneDNN's opaque layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _EXPECTED_ROWS)
    return packed


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str = "none") -> Tensor:
    """activation(x W^T + bias) for a packed `weight`; `activation` in oneDNN's names: none, swish (silu), gelu_tanh."""
    name, _, algorithm = activation.partition("_")
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, name, [], algorithm)
    return result


def packed_linear_times(x: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor) -> Tensor:
    """(x W^T + bias) x factor, element by element, for a packed `weight`."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, factor, weight, bias, "mul")
    return result


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An unfilled parameter that never asks for a gradient; the loader fills it."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
