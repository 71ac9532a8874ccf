"""Reading a GGUF file: metadata, the table of tensors, and tensors dequantised to floating point.

The bytes are walked by hand, because the gguf package's own reader takes seconds over a vocabulary; each length is
checked against the file, so that a damaged file gives an error which says where. What the metadata means is not
known here. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miniserve.errors import CheckpointError, UnsupportedModelError
from miniserve.kernels.quantised import Grid
from miniserve.models.gguf_grids import has_grid, read_grid

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
# Arrays up to this length are kept (values per layer); longer ones are vocabularies.
_MAX_KEPT_ARRAY = 1024
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
# Dequantised at once: enough for NumPy to be busy, little enough to stay in the processor's cache.
_CHUNK_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class QuantType:
    """How a tensor is stored: blocks of `block_size` elements, `block_bytes` bytes each."""

    id: int
    name: str
    block_size: int
    block_bytes: int


QUANT_TYPES = {
    quant.id: quant
    for quant in (
        QuantType(0, "F32", 1, 4),
        QuantType(1, "F16", 1, 2),
        QuantType(30, "BF16", 1, 2),
        QuantType(2, "Q4_0", 32, 18),
        QuantType(3, "Q4_1", 32, 20),
        QuantType(6, "Q5_0", 32, 22),
        QuantType(7, "Q5_1", 32, 24),
        QuantType(8, "Q8_0", 32, 34),
        QuantType(12, "Q4_K", 256, 144),
        QuantType(13, "Q5_K", 256, 176),
        QuantType(14, "Q6_K", 256, 210),
        QuantType(39, "MXFP4", 32, 17),
    )
}
_FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class SkippedArray:
    """Stands for a long array of the metadata, of which only the length is kept."""

    length: int


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """An entry of the tensor table. `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]  # as PyTorch has it: the dimension whose elements are adjacent comes last
    quant: QuantType
    offset: int
    num_bytes: int

    def parts(self) -> tuple[GGUFTensor, ...]:
        """What lies at each index of the first dimension; "name.weight" has "name.0.weight" and so on."""
        count = self.shape[0]
        name, _, kind = self.name.rpartition(".")
        size = self.num_bytes // count
        return tuple(
            replace(
                self,
                name=f"{name}.{index}.{kind}",
                shape=self.shape[1:],
                offset=self.offset + index * size,
                num_bytes=size,
            )
            for index in range(count)
        )


class GGUFFile:
    """An open GGUF file. `metadata` holds scalars, strings and short arrays; `tensors` are in the file's order.

    Raises:
        CheckpointError: the file is not GGUF, or is truncated or damaged; the message says where.
        UnsupportedModelError: a tensor is stored in a way that is not implemented.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # Copy-on-write: never written to, but PyTorch wants a writable buffer.
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError:  # mmap refuses an empty file
            raise CheckpointError(f"{path}: the file is empty") from None
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        cursor = _Cursor(path, self._bytes)
        num_tensors, num_entries = cursor.header()
        self.metadata: dict[str, Any] = cursor.metadata(num_entries)
        self.tensors = _tensor_table(cursor, num_tensors, self._alignment())

    def read(self, tensor: GGUFTensor) -> Tensor:
        """The tensor's values: F32, F16 and BF16 as they are, without a copy; everything else as float32."""
        dtype = _FLOAT_TYPES.get(tensor.quant.name)
        if dtype is not None:
            count = math.prod(tensor.shape)
            return torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=tensor.offset).view(tensor.shape)
        return self._dequantize(tensor)

    def grid(self, tensor: GGUFTensor) -> Grid | None:
        """A matrix as the whole numbers that it is stored as; None if it is stored in another way."""
        if len(tensor.shape) != 2 or not has_grid(tensor.quant.name):
            return None
        blocks = torch.frombuffer(self._bytes, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.offset)
        return read_grid(tensor.quant.name, blocks.view(tensor.shape[0], -1, tensor.quant.block_bytes))

    def _dequantize(self, tensor: GGUFTensor) -> Tensor:
        import gguf  # half a second, and not needed to read the metadata
        import numpy as np

        quant = tensor.quant
        stored = np.frombuffer(self._bytes, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        values = np.empty(math.prod(tensor.shape), dtype=np.float32)
        num_blocks = tensor.num_bytes // quant.block_bytes
        kind = gguf.GGMLQuantizationType(quant.id)
        # In long chunks, whatever the rows: row by row the same work takes four times as long.
        for start in range(0, num_blocks, _CHUNK_BLOCKS):
            end = min(start + _CHUNK_BLOCKS, num_blocks)
            chunk = stored[start * quant.block_bytes : end * quant.block_bytes]
            values[start * quant.block_size : end * quant.block_size] = gguf.dequantize(chunk, kind)
        return torch.from_numpy(values).view(tensor.shape)

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment must be a positive integer, got {alignment!r}")
        return alignment


class _Cursor:
    """Walks the bytes; every step is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self.position = 0

    def header(self) -> tuple[int, int]:
        """The number of tensors and of metadata entries."""
        if self._data[:4] != _MAGIC[: self._size]:
            raise CheckpointError(f"{self._path}: not a GGUF file (it starts with {self._data[:4]!r})")
        self.skip(4, "the file's header")
        version = self.number(_U32, "the file's version")
        if version not in _VERSIONS:
            raise CheckpointError(f"{self._path}: GGUF version {version} cannot be read, only 2 and 3")
        return self.number(_U64, "the number of tensors"), self.number(_U64, "the number of metadata entries")

    def metadata(self, num_entries: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for index in range(num_entries):
            key = self.string(f"the key of metadata entry {index} of {num_entries}")
            if key in entries:
                raise self.error(f"the metadata key {key} is there twice")
            entries[key] = self.value(self.number(_U32, f"the type of {key}"), key)
        return entries

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _SCALARS:
            raise self.error(f"{what} has the unknown value type {kind}")
        return self.number(_SCALARS[kind], what)

    def number(self, kind: struct.Struct, what: str) -> Any:
        start = self.position
        self.skip(kind.size, what)
        return kind.unpack_from(self._data, start)[0]

    def string(self, what: str) -> str:
        length = self.number(_U64, what)
        start = self.position
        self.skip(length, what)
        try:
            return self._data[start : self.position].decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8") from None

    def skip(self, count: int, what: str) -> None:
        if count > self._size - self.position:
            raise CheckpointError(
                f"{self._path}: the file is truncated or damaged: {what} takes {count} bytes from byte "
                f"{self.position} on, and the file ends at byte {self._size}"
            )
        self.position += count

    def quant_type(self, name: str) -> QuantType:
        number = self.number(_U32, f"the type of {name}")
        if number not in QUANT_TYPES:
            supported = ", ".join(quant.name for quant in QUANT_TYPES.values())
            raise UnsupportedModelError(
                f"{self._path}: tensor {name} is stored as {_type_name(number)}, which is not supported; "
                f"supported are {supported}"
            )
        return QUANT_TYPES[number]

    def check_inside(self, tensor: GGUFTensor) -> None:
        if tensor.offset + tensor.num_bytes > self._size:
            raise CheckpointError(
                f"{self._path}: the file is truncated or damaged: tensor {tensor.name} takes {tensor.num_bytes} "
                f"bytes from byte {tensor.offset} on, and the file ends at byte {self._size}"
            )

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: the file is damaged before byte {self.position}: {problem}")

    def _array(self, what: str) -> list[Any] | SkippedArray:
        kind = self.number(_U32, f"the element type of {what}")
        length = self.number(_U64, f"the length of {what}")
        if kind == _STRING and length > _MAX_KEPT_ARRAY:
            self._skip_strings(length, what)
            return SkippedArray(length)
        if kind in _SCALARS and length > _MAX_KEPT_ARRAY:
            self.skip(length * _SCALARS[kind].size, what)
            return SkippedArray(length)
        if kind == _ARRAY or length > _MAX_KEPT_ARRAY:
            raise self.error(f"{what} is an array of the unsupported element type {kind}")
        return [self.value(kind, what) for _ in range(length)]

    def _skip_strings(self, length: int, what: str) -> None:
        # A vocabulary is a hundred thousand strings: local names, and one comparison per string.
        data, size, position, unpack = self._data, self._size, self.position, _U64.unpack_from
        for _ in range(length):
            if position + 8 > size:
                position += 8
                break
            position += 8 + unpack(data, position)[0]
        self.skip(position - self.position, what)


def _type_name(number: int) -> str:
    import gguf

    try:
        return gguf.GGMLQuantizationType(number).name
    except ValueError:
        return f"type {number}"


def _tensor_table(cursor: _Cursor, num_tensors: int, alignment: int) -> tuple[GGUFTensor, ...]:
    entries = [_tensor_entry(cursor, index, num_tensors) for index in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            raise cursor.error(f"tensor {entry.name} is there twice")
        if entry.offset % alignment:
            raise cursor.error(f"tensor {entry.name} is not aligned to {alignment} bytes")
        tensor = replace(entry, offset=data_start + entry.offset)
        cursor.check_inside(tensor)
        tensors[tensor.name] = tensor
    return tuple(tensors.values())


def _tensor_entry(cursor: _Cursor, index: int, num_tensors: int) -> GGUFTensor:
    name = cursor.string(f"the name of tensor {index} of {num_tensors}")
    num_dims = cursor.number(_U32, f"the number of dimensions of {name}")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.error(f"tensor {name} has {num_dims} dimensions")
    shape = tuple(cursor.number(_U64, f"the shape of {name}") for _ in range(num_dims))[::-1]
    quant = cursor.quant_type(name)
    offset = cursor.number(_U64, f"the offset of {name}")
    if 0 in shape or shape[-1] % quant.block_size:
        raise cursor.error(f"tensor {name} of shape {list(shape)} cannot be stored as {quant.name}")
    num_bytes = math.prod(shape) // quant.block_size * quant.block_bytes
    return GGUFTensor(name, shape, quant, offset, num_bytes)
