"""Whether a backend gives what the reference gives, on this device: tried out, on a small step, before it is chosen.

Kernels of other libraries have limits that depend on their version, the device and the shapes: heads, blocks, windows.
What a library promises is not looked up here; what it does is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product

import torch
from torch import Tensor

from miniserve.attention.base import AttentionBackend, AttentionVariant, LayerKVCache
from miniserve.attention.batch import AttnMetadata
from miniserve.attention.torch_ref import TorchBackend

Lengths = Sequence[tuple[int, int]]  # (new tokens, whole length) of each request

# A library may take other kernels, with other limits, for each of these.
_STEPS: tuple[Lengths, ...] = (
    ((1, 40), (1, 1), (1, 600)),  # decodes
    ((1, 40), (37, 37), (20, 300), (1, 1), (1, 600)),  # decodes, a prompt, a chunk
    ((200, 350),),  # a long chunk
)
# A larger one would hide little or nothing of these steps.
_LARGEST_WINDOW = 100
# Of elements up to 1; of larger ones, relative.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass(frozen=True, slots=True)
class ProbeShape:
    """Of the model: its heads, and the cache's blocks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


@torch.inference_mode()
def why_not(
    backend: AttentionBackend, shape: ProbeShape, variants: Sequence[AttentionVariant], device: torch.device
) -> str | None:
    """What keeps the backend from serving layers of these variants; None where all is well."""
    reference = TorchBackend(backend.dtype)
    for of_model, step in product(variants, _STEPS):
        window = None if of_model.window is None else min(of_model.window, _LARGEST_WINDOW)
        variant = replace(of_model, window=window)
        try:
            output = _attend(backend, shape, variant, step, device)
        except Exception as error:
            return _first_line(error)
        expected = _attend(reference, shape, variant, step, device)
        difference = ((output - expected).abs() / expected.abs().clamp(min=1)).max().item()
        if not difference <= _TOLERANCES[backend.dtype]:  # nor NaN
            return f"it differs from the reference by {difference:.2g} (window {window})"
    return None


def _attend(
    backend: AttentionBackend, shape: ProbeShape, variant: AttentionVariant, step: Lengths, device: torch.device
) -> Tensor:
    """fp32 [num_tokens, num_heads, head_dim] of the step, after one that computed what the cache holds."""
    tables = _tables(shape, step, device)
    num_blocks = int(tables.max()) + 1
    cache_shape = backend.cache_shape(num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    cache = LayerKVCache(torch.zeros(cache_shape, dtype=backend.dtype, device=device))
    generator = torch.Generator().manual_seed(0)

    def attend(lengths: Lengths) -> Tensor:
        metadata = _metadata(lengths, tables, shape.block_size)
        num_heads = shape.num_heads + 2 * shape.num_kv_heads
        num_tokens = sum(new for new, _ in lengths)
        heads = torch.randn(num_tokens, num_heads, shape.head_dim, generator=generator).to(device, backend.dtype)
        plan = backend.plan(metadata)
        return plan(heads[:, : shape.num_heads], heads[:, shape.num_heads :], variant, cache).float()

    attend([(max(whole - new, 1), max(whole - new, 1)) for new, whole in step])
    return attend(step)


def _tables(shape: ProbeShape, step: Lengths, device: torch.device) -> Tensor:
    """int64 [num_reqs, max_blocks], of blocks in no order; block 0 belongs to nobody."""
    counts = [-(-whole // shape.block_size) for _, whole in step]
    ids = 1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1))
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int64)
    for row, blocks in zip(tables, torch.split(ids, counts), strict=True):
        row[: len(blocks)] = blocks
    return tables.to(device)


def _metadata(lengths: Lengths, tables: Tensor, block_size: int) -> AttnMetadata:
    device = tables.device
    new_lens, seq_lens = (tuple(column) for column in zip(*lengths, strict=True))
    positions = torch.cat([torch.arange(whole - new, whole) for new, whole in lengths]).to(device)
    requests = torch.repeat_interleave(torch.tensor(new_lens)).to(device)
    width = -(-max(seq_lens) // block_size)
    return AttnMetadata(
        slot_mapping=tables[requests, positions // block_size] * block_size + positions % block_size,
        query_start_loc=torch.tensor([0, *accumulate(new_lens)], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_tables=tables[:, :width].contiguous(),
        query_lens_host=new_lens,
        seq_lens_host=seq_lens,
        block_size=block_size,
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
