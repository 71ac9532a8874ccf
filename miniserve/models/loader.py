"""Weights into a model: one tensor at a time, straight into its place, and nothing left over or left out.

The model's parameters decide what is expected; the family's names say where it is in the files. The whole plan is
made from the files' headers before the first byte of data is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from miniserve.errors import CheckpointError, UnsupportedModelError
from miniserve.models.checkpoint import Checkpoint
from miniserve.models.family import TensorNames, row_sizes
from miniserve.models.gguf import GGUFFile

# safetensors' names of the dtypes that hold plain weights.
_DTYPES = ("F64", "F32", "F16", "BF16")
_DUMMY_STD = 0.02
_MAX_LISTED = 3


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint that is not read yet."""

    name: str
    shape: tuple[int, ...]
    file: Path
    read: Callable[[], Tensor]


def load_weights(
    model: nn.Module, checkpoint: Checkpoint, *, on_tensor: Callable[[int, int], None] | None = None
) -> None:
    """Fill every parameter of `model`, converting to its dtype and device.

    Args:
        model: with the parameter names of `Transformer`.
        checkpoint: opened with its weights.
        on_tensor: called after each tensor with (done, total).

    Raises:
        CheckpointError: a tensor is missing, unused, there twice, misshapen or not finite, or a file is damaged.
        UnsupportedModelError: a tensor is stored in a dtype that is not supported.
    """
    with ExitStack() as stack, torch.no_grad(), _one_thread():
        stored = _stored_tensors(checkpoint, stack)
        targets = _targets(model, checkpoint)
        spare_head = _check_names(stored, targets, checkpoint)
        wanted = [tensor for tensor in stored.values() if tensor.name in targets]
        for tensor in wanted:
            _check_shape(tensor, targets[tensor.name])
        for done, tensor in enumerate(wanted, 1):
            _fill(targets[tensor.name], tensor)
            if on_tensor is not None:
                on_tensor(done, len(wanted))
        if spare_head is not None:
            _check_spare_head(spare_head, model.get_parameter("embed.weight"))


def init_dummy_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter with small random numbers, norms with ones, biases with zeros; reproducible."""
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                device = parameter.device
                if device not in generators:
                    generators[device] = torch.Generator(device).manual_seed(seed)
                parameter.normal_(0.0, _DUMMY_STD, generator=generators[device])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Loading is hundreds of short copies: on busy cores, waiting for a second thread takes longer than they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _targets(model: nn.Module, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Tensor name in the files -> the rows of a parameter that it fills."""
    names = _names(checkpoint)
    targets: dict[str, Tensor] = {}
    for parameter_name, parameter in model.named_parameters():
        sources = names.sources(parameter_name)
        sizes = row_sizes(parameter_name, checkpoint.config) if len(sources) > 1 else [len(parameter)]
        targets.update(zip(sources, torch.split(parameter.data, sizes), strict=True))
    return targets


def _names(checkpoint: Checkpoint) -> TensorNames:
    return checkpoint.family.gguf_names if checkpoint.is_gguf else checkpoint.family.hf_names


def _check_names(
    stored: Mapping[str, StoredTensor], targets: Mapping[str, Tensor], checkpoint: Checkpoint
) -> StoredTensor | None:
    """Compare what is there with what is needed. Returns the head's tensor where a tied model has one too."""
    missing = [name for name in targets if name not in stored]
    if missing:
        raise CheckpointError(f"{checkpoint.path}: {_listed(missing)} missing{_head_hint(missing, checkpoint)}")
    names = _names(checkpoint)
    head = names.sources("head.weight")[0]
    unused = [name for name in stored if name not in targets and not name.endswith(names.ignored)]
    spare_head = None
    if checkpoint.config.tie_word_embeddings and head in unused:
        unused.remove(head)
        spare_head = stored[head]
    if unused:
        raise CheckpointError(
            f"{checkpoint.path}: {_listed(unused)} not used by a {checkpoint.family.name} model with this config"
        )
    return spare_head


def _head_hint(missing: list[str], checkpoint: Checkpoint) -> str:
    head = _names(checkpoint).sources("head.weight")[0]
    return " (tie_word_embeddings is false, so the head needs its own weights)" if head in missing else ""


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_LISTED])
    if len(names) > _MAX_LISTED:
        return f"tensors {shown} and {len(names) - _MAX_LISTED} more are"
    return f"tensor {shown} is" if len(names) == 1 else f"tensors {shown} are"


def _check_shape(tensor: StoredTensor, target: Tensor) -> None:
    if tensor.shape != tuple(target.shape):
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, the config needs {list(target.shape)}"
        )


def _fill(target: Tensor, tensor: StoredTensor) -> None:
    target.copy_(tensor.read())
    # The sum is finite only if every element is, and it also sees what the conversion made infinite.
    if not torch.isfinite(target.sum(dtype=torch.float32)):
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name} has values that are not finite in {target.dtype}")


def _check_spare_head(head: StoredTensor, embedding: Tensor) -> None:
    same = head.shape == tuple(embedding.shape) and torch.equal(
        head.read().to(embedding.device, embedding.dtype), embedding
    )
    if not same:
        raise CheckpointError(
            f"{head.file}: tensor {head.name} differs from the embedding, but tie_word_embeddings is true"
        )


def _stored_tensors(checkpoint: Checkpoint, stack: ExitStack) -> dict[str, StoredTensor]:
    """Every tensor of every file, by name, in the files' order."""
    assert checkpoint.weight_files, "opened without weights"
    stored: dict[str, StoredTensor] = {}
    for path in checkpoint.weight_files:
        tensors = _gguf_tensors(checkpoint) if checkpoint.is_gguf else _safetensors(path, stack)
        for tensor in tensors:
            if tensor.name in stored:
                raise CheckpointError(f"tensor {tensor.name} is in both {stored[tensor.name].file} and {tensor.file}")
            stored[tensor.name] = tensor
    return stored


def _safetensors(path: Path, stack: ExitStack) -> Iterator[StoredTensor]:
    try:
        file: Any = stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: the file is truncated or damaged: {error}") from error
    for name in file.keys():  # noqa: SIM118 - not a mapping
        header = file.get_slice(name)
        if header.get_dtype() not in _DTYPES:
            raise UnsupportedModelError(
                f"{path}: tensor {name} is stored as {header.get_dtype()}, which is not supported; "
                f"supported are {', '.join(_DTYPES)}"
            )
        yield StoredTensor(name, tuple(header.get_shape()), path, partial(file.get_tensor, name))


def _gguf_tensors(checkpoint: Checkpoint) -> Iterator[StoredTensor]:
    file = GGUFFile(checkpoint.path)
    for tensor in file.tensors:
        read: Callable[[], Tensor] = partial(file.read, tensor)
        num_heads = _heads_to_reorder(tensor.name, checkpoint)
        if num_heads is not None:
            read = partial(_pairs_apart, read, num_heads)
        yield StoredTensor(tensor.name, tensor.shape, file.path, read)


def _heads_to_reorder(name: str, checkpoint: Checkpoint) -> int | None:
    if not checkpoint.family.gguf_pairs_adjacent:
        return None
    if ".attn_q." in name:
        return checkpoint.config.num_heads
    return checkpoint.config.num_kv_heads if ".attn_k." in name else None


def _pairs_apart(read: Callable[[], Tensor], num_heads: int) -> Tensor:
    """Rows of q or k from llama.cpp's order to ours.

    It turns rows 2i and 2i + 1 of a head together; here the pair is rows i and i + head_dim / 2.
    """
    rows = read()  # [num_heads * head_dim, ...]
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])  # [num_heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape)
