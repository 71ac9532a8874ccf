"""The GGUF reader against the gguf package's writer, and against damage."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from miniserve.errors import CheckpointError, UnsupportedModelError
from miniserve.models.gguf import QUANT_TYPES, GGUFFile, SkippedArray

# The package can quantise to these; the K types are made from random blocks.
WRITABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")


def stored_values(quant: str, shape: tuple[int, int]) -> np.ndarray:
    """Random values as the type's blocks: bytes, or plain floats."""
    rng = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType[quant]
    if quant in WRITABLE:
        return gguf.quantize(rng.standard_normal(shape, dtype=np.float32), kind)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // block_size, block_bytes), dtype=np.uint8)
    # The scales are fp16: bytes whose exponent is small keep them finite.
    scales = slice(-2, None) if quant == "Q6_K" else slice(0, 4)
    blocks[:, scales] = np.full(blocks[:, scales].size // 2, 0.01, np.float16).view(np.uint8).reshape(len(blocks), -1)
    return blocks.reshape(shape[0], -1)


def write_file(path: Path, quants: tuple[str, ...] = ("F32",), shape: tuple[int, int] = (3, 256)) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_bool("flag", True)
    writer.add_int64("wide", -(2**40))
    writer.add_array("per_layer", [1, 2, 3])
    writer.add_array("words", ["a", "é", ""])
    writer.add_array("vocabulary", [f"token {index}" for index in range(1500)])
    writer.add_array("scores", [0.5] * 1500)
    for quant in quants:
        kind = gguf.GGMLQuantizationType[quant]
        writer.add_tensor(f"{quant}.weight", stored_values(quant, shape), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    metadata = GGUFFile(write_file(tmp_path / "a.gguf")).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 2
    assert metadata["llama.rope.freq_base"] == 1e5
    assert metadata["flag"] is True
    assert metadata["wide"] == -(2**40)
    assert metadata["per_layer"] == [1, 2, 3]
    assert metadata["words"] == ["a", "é", ""]
    assert metadata["vocabulary"] == SkippedArray(1500)
    assert metadata["scores"] == SkippedArray(1500)


@pytest.mark.parametrize("quant", WRITABLE + K_TYPES)
def test_every_type_is_dequantised_as_the_package_does(tmp_path: Path, quant: str) -> None:
    # More blocks than one chunk holds, and a last chunk that is not full.
    shape = (700, 256) if quant.startswith(("Q", "MX")) and quant not in K_TYPES else (4100, 256)
    file = GGUFFile(write_file(tmp_path / "a.gguf", (quant,), shape))
    (tensor,) = file.tensors
    expected = gguf.dequantize(stored_values(quant, shape), gguf.GGMLQuantizationType[quant])
    assert tensor.shape == shape
    assert torch.equal(file.read(tensor).float(), torch.from_numpy(expected.reshape(shape)))
    assert expected.std() > 0


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_a_grid_is_what_the_file_has(tmp_path: Path, quant: str) -> None:
    file = GGUFFile(write_file(tmp_path / "a.gguf", (quant,), (40, 512)))
    (tensor,) = file.tensors
    grid, values = file.grid(tensor), file.read(tensor)
    assert grid is not None and grid.shape == (40, 512)
    assert grid.bits == (8 if quant == "Q8_0" else 4)
    if quant == "Q4_K":  # its scales are products that fp16 cannot hold
        torch.testing.assert_close(grid.values, values, rtol=2e-3, atol=2e-3 * float(values.abs().max()))
    else:
        assert torch.equal(grid.values, values)


def test_what_has_no_grid(tmp_path: Path) -> None:
    file = GGUFFile(write_file(tmp_path / "a.gguf", ("F32", "BF16", "Q5_0", "Q5_1", "Q5_K", "Q6_K")))
    assert [file.grid(tensor) for tensor in file.tensors] == [None] * 6


def test_block_sizes_are_the_packages_own() -> None:
    for number, quant in QUANT_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert quant.name == kind.name
        assert (quant.block_size, quant.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
    assert {quant.name for quant in QUANT_TYPES.values()} == {*WRITABLE, *K_TYPES}


def test_an_unsupported_type_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("odd.weight", np.zeros((2, 66), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"odd\.weight is stored as IQ2_XXS.*Q4_K"):
        GGUFFile(tmp_path / "a.gguf")


def test_a_file_cut_anywhere_is_refused_with_its_name(tmp_path: Path) -> None:
    """Bug kind: a download that broke off gave a struct.error, or a model with garbage in its last layers."""
    whole = write_file(tmp_path / "whole.gguf", ("Q8_0", "F32"), (2, 32)).read_bytes()
    cut = tmp_path / "cut.gguf"
    data_end = len(whole.rstrip(b"\0"))  # the file may end with padding, which nobody misses
    for length in [*range(min(500, data_end)), *range(500, data_end, 97), data_end - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf.*(truncated|empty)"):
            GGUFFile(cut)


def test_damaged_bytes_give_a_checkpoint_error_or_nothing_worse(tmp_path: Path) -> None:
    """Bug kind: one wrong length asked for petabytes of memory."""
    whole = write_file(tmp_path / "whole.gguf", ("F32",), (2, 32)).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    refused = 0
    for position in [*range(0, 400, 3), *range(len(whole) - 400, len(whole) - 256, 3)]:
        for value in (0x00, 0x7F, 0xFF):
            damaged.write_bytes(whole[:position] + bytes([value]) + whole[position + 1 :])
            try:
                GGUFFile(damaged)
            except (CheckpointError, UnsupportedModelError) as error:
                assert "damaged.gguf" in str(error)
                refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("head", "named"),
    [
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**61), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1), "element type 9"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77), "value type 77"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + struct.pack("<II", 4, 1), "not UTF-8"),
        (b"", "empty"),
    ],
)
def test_a_wrong_header_is_refused(tmp_path: Path, head: bytes, named: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(head)
    with pytest.raises(CheckpointError, match=rf"a\.gguf.*{named}"):
        GGUFFile(path)


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="directory"):
        GGUFFile(tmp_path)


def test_a_large_vocabulary_is_skipped(tmp_path: Path) -> None:
    """Bug kind: the package's own reader takes seconds over the vocabulary of a small model."""
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", [f"token {index}" for index in range(150_000)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GGUFFile(tmp_path / "a.gguf").metadata["tokenizer.ggml.tokens"] == SkippedArray(150_000)
