"""Weights into a model: one tensor at a time, straight into its place, and nothing left over or left out.

The model's parameters decide what is expected; the family's names say where it is in the files. The whole plan is
made from the files' headers before the first byte of data is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from miniserve.errors import CheckpointError, UnsupportedModelError
from miniserve.kernels.quantised import Grid, joined
from miniserve.models.checkpoint import Checkpoint
from miniserve.models.family import TensorNames, row_sizes
from miniserve.models.stored import StoredTensor, gguf_tensors, safetensors

# safetensors' names of the dtypes that hold plain weights.
_DTYPES = ("F64", "F32", "F16", "BF16")
_DUMMY_STD = 0.02
_MAX_LISTED = 3


OnModule = Callable[[str, Grid | None], None]


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    on_tensor: Callable[[int, int], None] | None = None,
    on_module: OnModule = lambda _name, _grid: None,
    keep_grids: Collection[str] = (),
) -> None:
    """Fill every parameter of `model`, converting to its dtype and device: one module after the other.

    Args:
        model: with the parameter names of `Transformer`.
        checkpoint: opened with its weights.
        on_tensor: called after each tensor with (done, total).
        on_module: called with a module's name when its parameters are there.
        keep_grids: modules that are not filled with a weight that is stored as whole numbers: `on_module` gets these.

    Raises:
        CheckpointError: a tensor is missing, unused, there twice, misshapen or not finite, or a file is damaged.
        UnsupportedModelError: a tensor is stored in a dtype that is not supported.
    """
    with ExitStack() as stack, torch.no_grad():
        stored = _stored_tensors(checkpoint, stack)
        targets = _targets(model, checkpoint)
        names = [name for rows in targets.values() for name in rows]
        spare_head = _check_names(stored, names, checkpoint)
        for rows in targets.values():
            for name, target in rows.items():
                _check_shape(stored[name], target)
        done = 0
        norm_offset = 0.0 if checkpoint.is_gguf else checkpoint.family.hf_norm_offset
        for module, parameters in groupby(list(targets), key=_module_of):
            may_keep = module in keep_grids and not (module == "embed" and spare_head is not None)
            grid = None
            for parameter in parameters:
                rows = targets.pop(parameter)  # it would keep the plain weight alive
                is_weight = parameter.endswith(".weight")
                if is_weight and may_keep:
                    grid = _grid([stored[name] for name in rows])
                if grid is None or not is_weight:
                    _fill_rows(rows, stored)
                if norm_offset and parameter.endswith("norm.weight"):
                    model.get_parameter(parameter).add_(norm_offset)
                for _ in rows:
                    done += 1
                    if on_tensor is not None:
                        on_tensor(done, len(names))
            if spare_head is not None and module == "embed":
                _check_spare_head(spare_head, model.get_parameter("embed.weight"))
            on_module(module, grid)


def init_dummy_weights(model: nn.Module, seed: int, *, on_module: OnModule = lambda _name, _grid: None) -> None:
    """Fill every parameter with small random numbers, norms with ones, biases with zeros; reproducible.

    `on_module` is called with the name of each module that has parameters, when they are there.
    """
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for module, names in groupby([name for name, _ in model.named_parameters()], key=_module_of):
            for name in names:
                _init_dummy(name, model.get_parameter(name), generators, seed)
            on_module(module, None)


def _init_dummy(name: str, parameter: nn.Parameter, generators: dict[torch.device, torch.Generator], seed: int) -> None:
    if name.endswith("norm.weight"):
        parameter.fill_(1.0)
    elif name.endswith(".bias"):
        parameter.zero_()
    else:
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        parameter.normal_(0.0, _DUMMY_STD, generator=generators[device])


def _grid(tensors: Sequence[StoredTensor]) -> Grid | None:
    """The grid of a weight, if all of its parts are stored as whole numbers of one kind."""
    grids = []
    for tensor in tensors:
        grid = tensor.read_grid()
        if grid is None:
            return None
        if not (_is_finite(grid.scales) and (grid.offsets is None or _is_finite(grid.offsets))):
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name} has scales that are not finite")
        grids.append(grid)
    return joined(grids)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Loading is hundreds of short copies: on busy cores, waiting for a second thread takes longer than they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _targets(model: nn.Module, checkpoint: Checkpoint) -> dict[str, dict[str, Tensor]]:
    """By parameter: which of its rows each tensor of the files fills. Parameters of a module follow each other."""
    names = _names(checkpoint)
    targets: dict[str, dict[str, Tensor]] = {}
    for parameter_name, parameter in model.named_parameters():
        sources = names.sources(parameter_name)
        sizes = row_sizes(parameter_name, len(parameter), checkpoint.config) if len(sources) > 1 else [len(parameter)]
        targets[parameter_name] = dict(zip(sources, torch.split(parameter.data, sizes), strict=True))
    return targets


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _names(checkpoint: Checkpoint) -> TensorNames:
    return checkpoint.family.gguf_names if checkpoint.is_gguf else checkpoint.family.hf_names


def _check_names(
    stored: Mapping[str, StoredTensor], needed: Collection[str], checkpoint: Checkpoint
) -> StoredTensor | None:
    """Compare what is there with what is needed. Returns the head's tensor where a tied model has one too."""
    missing = [name for name in needed if name not in stored]
    if missing:
        raise CheckpointError(f"{checkpoint.path}: {_listed(missing)} missing{_head_hint(missing, checkpoint)}")
    names = _names(checkpoint)
    head = names.sources("head.weight")[0]
    unused = [name for name in stored if name not in needed and not name.endswith(names.ignored)]
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


def _fill_rows(rows: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
    with _one_thread():
        for name, target in rows.items():
            _fill(target, stored[name])


def _fill(target: Tensor, tensor: StoredTensor) -> None:
    target.copy_(tensor.read())
    if not _is_finite(target):  # also what the conversion made infinite
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name} has values that are not finite in {target.dtype}")


def _is_finite(tensor: Tensor) -> bool:
    # A sum is finite only if every element is.
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32)))


def _check_spare_head(head: StoredTensor, embedding: Tensor) -> None:
    same = head.shape == tuple(embedding.shape) and torch.equal(
        head.read().to(embedding.device, embedding.dtype), embedding
    )
    if not same:
        raise CheckpointError(
            f"{head.file}: tensor {head.name} differs from the embedding, but tie_word_embeddings is true"
        )


def _stored_tensors(checkpoint: Checkpoint, stack: ExitStack) -> dict[str, StoredTensor]:
    """Every tensor of every file, by name, in the files' order; what holds all experts of a layer in parts."""
    assert checkpoint.weight_files, "opened without weights"
    stored: dict[str, StoredTensor] = {}
    for path in checkpoint.weight_files:
        for tensor in (
            gguf_tensors(path, partial(_order, checkpoint)) if checkpoint.is_gguf else safetensors(path, stack)
        ):
            if tensor.name in stored:
                raise CheckpointError(f"tensor {tensor.name} is in both {stored[tensor.name].file} and {tensor.file}")
            stored[tensor.name] = tensor
    if not checkpoint.is_gguf:
        stored = checkpoint.family.unstack(stored)
    for tensor in stored.values():
        if tensor.dtype not in _DTYPES:
            raise UnsupportedModelError(
                f"{tensor.file}: tensor {tensor.name} is stored as {tensor.dtype}, which is not supported; "
                f"supported are {', '.join(_DTYPES)}"
            )
    return stored


def _order(checkpoint: Checkpoint, name: str) -> Callable[[Tensor], Tensor]:
    """What puts the rows of a GGUF file's tensor into our order."""
    if checkpoint.family.gguf_pairs_adjacent and ".attn_q." in name:
        return partial(_pairs_apart, num_heads=checkpoint.config.num_heads)
    if checkpoint.family.gguf_pairs_adjacent and ".attn_k." in name:
        return partial(_pairs_apart, num_heads=checkpoint.config.num_kv_heads)
    return _as_they_are


def _as_they_are(rows: Tensor) -> Tensor:
    return rows


def _pairs_apart(rows: Tensor, *, num_heads: int) -> Tensor:
    """Rows of q or k [num_heads * head_dim, ...] from llama.cpp's order to ours.

    It turns rows 2i and 2i + 1 of a head together; here the pair is rows i and i + head_dim / 2.
    """
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])  # [num_heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape)
