"""Matrices as small whole numbers: how weights become codes and scales, and the products with them.

What the operators do with them stands in `csrc/quantised.cpp`. Knows no file format and no layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from miniserve.kernels.layout import CHUNK, huge_pages, interleaved, padded, round_up
from miniserve.kernels.native import Matrix, NativeKernels, OutputArguments, RowArguments

GROUP = 32  # elements of a row that share a scale, where they are not all of them
_DIGIT_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Grid:
    """A matrix [num_rows, size] as codes: scale x (code - zero), or scale x code + offset.

    Attributes:
        codes: uint8 [num_rows, size], below 2^bits.
        bits: 8 or 4.
        scales: fp32 [num_rows], one for each row, with 8 bits; or fp16 [num_rows, groups of 32], rounded up.
        offsets: as fp16 scales; None where the code `zero`, 128 or 8, stands for 0.
    """

    codes: Tensor
    bits: int
    scales: Tensor
    offsets: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(num_rows, size)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def zero(self) -> int:
        """The code that stands for 0, where there are no offsets."""
        return 1 << (self.bits - 1)

    @property
    def values(self) -> Tensor:
        """What it stands for, fp32 [num_rows, size]."""
        codes = self.codes.float()
        if self.offsets is not None:
            return self._of_elements(self.scales) * codes + self._of_elements(self.offsets)
        return self._of_elements(self.scales) * (codes - self.zero)

    def map(self, rows: Callable[[Tensor], Tensor]) -> Grid:
        """Its rows in another order or number, as `rows` makes of each of its tensors."""
        offsets = None if self.offsets is None else rows(self.offsets)
        return Grid(rows(self.codes), self.bits, rows(self.scales), offsets)

    def _of_elements(self, column: Tensor) -> Tensor:
        if column.dim() == 1:
            return column.unsqueeze(1)
        return column.float().repeat_interleave(GROUP, dim=1)[:, : self.codes.shape[1]]


def joined(grids: Sequence[Grid]) -> Grid | None:
    """The rows of all, one after the other; None where they are not of one kind."""
    kinds = {(grid.bits, grid.scales.shape[1:], grid.offsets is None) for grid in grids}
    if len(kinds) != 1:
        return None
    with_offsets = [grid.offsets for grid in grids if grid.offsets is not None]
    return Grid(
        torch.cat([grid.codes for grid in grids]),
        grids[0].bits,
        torch.cat([grid.scales for grid in grids]),
        torch.cat(with_offsets) if with_offsets else None,
    )


def in_rows(weight: Tensor) -> Grid:
    """8 bits and a scale for each row of weight [num_rows, size], to the nearest: its largest element becomes 127."""
    rows = weight.float()
    scales = rows.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    codes = (rows / scales.unsqueeze(1)).round_().add_(128).to(torch.uint8)
    return Grid(codes, 8, scales)


def in_groups(weight: Tensor) -> Grid:
    """4 bits, a scale and an offset for each 32 elements of a row: their smallest becomes 0, their largest 15."""
    num_rows, size = weight.shape
    filling = weight[:, -1:].expand(-1, -size % GROUP)  # what widens no group
    groups = torch.cat((weight, filling), dim=1).float().view(num_rows, -1, GROUP)
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    offsets = low.half()
    scales = ((high - offsets.float()) / 15).half()
    divisor = scales.float().clamp_min(torch.finfo(torch.float32).tiny)
    codes = ((groups - offsets.float().unsqueeze(-1)) / divisor.unsqueeze(-1)).round_().clamp_(0, 15)
    return Grid(codes.to(torch.uint8).view(num_rows, -1)[:, :size].contiguous(), 4, scales, offsets)


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to keep a model's matrices.

    Attributes:
        grid: makes a layer's weight small.
        head_grid: the same for the matrix that gives the logits, whose rounding shows most.
        num_digits: see `QuantisedMatrix`.
    """

    grid: Callable[[Tensor], Grid]
    head_grid: Callable[[Tensor], Grid]
    num_digits: int


SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "int8": Scheme(in_rows, in_rows, num_digits=2),
        "int8-fast": Scheme(in_rows, in_rows, num_digits=1),
        "int4": Scheme(in_groups, in_rows, num_digits=2),
    }
)


class QuantisedMatrix(Matrix):
    """A `Grid` in the kernels' layout.

    Args:
        kernels: that multiply.
        grid: the weight.
        bias: fp32 or bf16 [num_rows], or None.
        dtype: of the layer's results.
        num_digits: of 7 bits, that what it is multiplied with is kept in: 2 is no worse than bf16, 1 is faster.
        gate: as in `PackedMatrix`.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        grid: Grid,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        num_digits: int = 2,
        gate: bool = False,
    ) -> None:
        super().__init__(kernels, *grid.shape, dtype)
        self._bits, self._num_digits, self._has_offsets = grid.bits, num_digits, grid.offsets is not None
        if gate:
            bias = None if bias is None else interleaved(bias)
            grid = grid.map(interleaved)
        columns = round_up(grid.shape[0])
        whole_rows = grid.scales.dim() == 1
        self._scales = padded(grid.scales, columns) if whole_rows else None
        self._bias = None if bias is None else padded(bias.float(), columns)
        self._packed = huge_pages(_num_bytes(grid, columns), torch.uint8)
        offsets = None if grid.offsets is None else grid.offsets.contiguous()
        scales = None if whole_rows else grid.scales.contiguous()
        kernels.pack_grid(grid.codes.contiguous(), scales, offsets, grid.bits, self._packed)

    @property
    def num_bytes(self) -> int:
        """Memory of the matrix."""
        return self._packed.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def rows(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """As `Matrix.rows`."""
        out = torch.empty((len(ids), self.in_features), dtype=torch.float32)
        self.kernels.unpack_quantised_columns(
            self._packed, self._scales, self.out_features, self._bits, self._has_offsets, ids, scale, out
        )
        return out

    def _run(self, rows: RowArguments, output: OutputArguments) -> None:
        x, *norm = rows
        self.kernels.linear_quantised(
            x,
            self._packed,
            self._scales,
            self.out_features,
            self._bits,
            self._has_offsets,
            self._num_digits,
            self._bias,
            *norm,
            *output,
        )


def _num_bytes(grid: Grid, columns: int) -> int:
    """Of the layout in `csrc/grid.h`."""
    size = grid.shape[1]
    if grid.scales.dim() == 1:
        return columns * round_up(size, _DIGIT_CHUNK)
    halves = 2 if grid.offsets is not None else 1
    chunk = GROUP * CHUNK * grid.bits // 8 + halves * CHUNK * grid.scales.itemsize
    return columns // CHUNK * (round_up(size, GROUP) // GROUP) * chunk
