"""The tensors of a checkpoint's files, of which nothing is read yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from miniserve.errors import CheckpointError
from miniserve.kernels.quantised import Grid
from miniserve.models.gguf import GGUFFile, GGUFTensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint that is not read yet.

    Attributes:
        dtype: in safetensors' spelling; F32 for what is converted as it is read.
        read: its values.
        read_part: those at one index of the first dimension.
        read_grid: a matrix as the whole numbers that it is stored as; None where it is stored in another way.
    """

    name: str
    shape: tuple[int, ...]
    file: Path
    read: Callable[[], Tensor]
    read_grid: Callable[[], Grid | None] = lambda: None
    dtype: str = "F32"
    read_part: Callable[[int], Tensor] | None = None


def safetensors(path: Path, stack: ExitStack) -> Iterator[StoredTensor]:
    """Those of a safetensors file, which `stack` closes.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        file: Any = stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: the file is truncated or damaged: {error}") from error
    for name in file.keys():  # noqa: SIM118 - not a mapping
        header = file.get_slice(name)
        yield StoredTensor(
            name,
            tuple(header.get_shape()),
            path,
            partial(file.get_tensor, name),
            dtype=header.get_dtype(),
            read_part=header.__getitem__,
        )


def gguf_tensors(path: Path, order: Callable[[str], Callable[[Tensor], Tensor]]) -> Iterator[StoredTensor]:
    """Those of a GGUF file; one that holds a matrix for each expert of a layer as its parts.

    `order` says, by a tensor's name, in which order its rows are wanted.
    """
    file = GGUFFile(path)
    for stacked in file.tensors:
        for tensor in stacked.parts() if "_exps." in stacked.name else (stacked,):
            rows = order(tensor.name)
            read, read_grid = partial(_read, file, tensor, rows), partial(_read_grid, file, tensor, rows)
            yield StoredTensor(tensor.name, tensor.shape, file.path, read, read_grid)


def _read(file: GGUFFile, tensor: GGUFTensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
    return rows(file.read(tensor))


def _read_grid(file: GGUFFile, tensor: GGUFTensor, rows: Callable[[Tensor], Tensor]) -> Grid | None:
    grid = file.grid(tensor)
    return None if grid is None else grid.map(rows)
