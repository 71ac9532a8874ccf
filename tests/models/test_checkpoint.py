"""What the --model argument may be, and what each of them must contain."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miniserve.errors import CheckpointError, ConfigError
from miniserve.models import hub
from miniserve.models.checkpoint import locate_tokenizer, open_checkpoint
from tests.models.ropes import only_rope
from tests.support import embedded_gguf

WriteJson = Callable[[str, Any], Path]


@pytest.fixture
def hub_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str | None, bool]]:
    """Records what would be asked of the hub; the test's folder is the answer."""
    calls: list[tuple[str, str | None, bool]] = []

    def download(model_id: str, revision: str | None, *, weights: bool = True) -> Path:
        calls.append((model_id, revision, weights))
        return tmp_path

    monkeypatch.setattr(hub, "download", download)
    return calls


def test_the_embedded_model_is_found_and_not_imported() -> None:
    checkpoint = open_checkpoint("smollm2")
    config = checkpoint.config
    assert checkpoint.is_gguf
    assert checkpoint.weight_files == (checkpoint.path,)
    assert (config.family, config.vocab_size, config.hidden_size) == ("llama", 49152, 576)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert only_rope(config).theta == 100000.0
    assert config.tie_word_embeddings
    assert config.eos_token_ids == {2}


def test_a_missing_embedded_model_gives_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="uv sync"):
        open_checkpoint("smollm2")


def test_a_folder(tiny: dict[str, Any], write_json: WriteJson, tmp_path: Path) -> None:
    write_json("config.json", {**tiny, "eos_token_id": 1})
    write_json(
        "generation_config.json",
        {"eos_token_id": 2, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1},
    )
    (tmp_path / "model.safetensors").touch()
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.name == str(tmp_path)
    assert checkpoint.path == tmp_path
    assert not checkpoint.is_gguf
    assert checkpoint.weight_files == (tmp_path / "model.safetensors",)
    assert checkpoint.config.eos_token_ids == {1, 2}
    defaults = checkpoint.generation
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.min_p) == (0.6, 0.95, 20, None)
    assert defaults.repetition_penalty == 1.1


def test_a_folder_may_be_called_like_a_file(tiny: dict[str, Any], write_json: WriteJson, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").mkdir()
    write_json("model.gguf/config.json", tiny)
    assert not open_checkpoint(str(tmp_path / "model.gguf"), weights=False).is_gguf


def test_shards_come_from_the_index(tiny: dict[str, Any], write_json: WriteJson, tmp_path: Path) -> None:
    write_json("config.json", tiny)
    write_json("model.safetensors.index.json", {"weight_map": {"b": "2.safetensors", "a": "1.safetensors"}})
    (tmp_path / "1.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"2\.safetensors"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "2.safetensors").touch()
    files = open_checkpoint(str(tmp_path)).weight_files
    assert [file.name for file in files] == ["1.safetensors", "2.safetensors"]


def test_an_index_cannot_point_out_of_its_folder(tiny: dict[str, Any], write_json: WriteJson, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_json("model/config.json", tiny)
    write_json("model/model.safetensors.index.json", {"weight_map": {"a": "../other.safetensors"}})
    (tmp_path / "other.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"\.\./other"):
        open_checkpoint(str(folder))


def test_without_weights_only_the_config_is_needed(tiny: dict[str, Any], write_json: WriteJson, tmp_path: Path) -> None:
    write_json("config.json", tiny)
    assert open_checkpoint(str(tmp_path), weights=False).weight_files == ()
    with pytest.raises(CheckpointError, match=r"model\.safetensors or .*index\.json is missing"):
        open_checkpoint(str(tmp_path))


def test_a_folder_of_bin_files_asks_for_safetensors(
    tiny: dict[str, Any], write_json: WriteJson, tmp_path: Path
) -> None:
    write_json("config.json", tiny)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="safetensors are needed"):
        open_checkpoint(str(tmp_path))


def test_a_folder_of_one_gguf_file_is_that_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.symlink_to(embedded_gguf())
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.is_gguf and checkpoint.path == file and checkpoint.name == str(tmp_path)
    assert locate_tokenizer(str(tmp_path)) == file


def test_a_folder_of_gguf_files_names_one(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_0.gguf").touch()
    (tmp_path / "model.Q8_0.gguf").touch()
    with pytest.raises(
        CheckpointError,
        match=r"config\.json is missing; to use one of its 2 GGUF files, name it, such as .*model\.Q4_0\.gguf",
    ):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[1]", "\ud83d", "[" * 100_000])
def test_a_damaged_config_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    "model",
    ["./nowhere", "../nowhere", "~/nowhere", "/nowhere/model", "nowhere.gguf", "owner/x.gguf", "a/b/c"],
)
def test_a_mistyped_path_is_not_sent_to_the_hub(model: str, hub_calls: list[Any]) -> None:
    """Bug kind: a wrong path was looked up on the hub, and the error spoke of access tokens."""
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(model)
    assert hub_calls == []


def test_a_hub_id_is_downloaded(hub_calls: list[Any], tiny: dict[str, Any], write_json: WriteJson) -> None:
    write_json("config.json", tiny)
    assert open_checkpoint("owner/model", revision="v1", weights=False).config.family == "llama"
    assert hub_calls == [("owner/model", "v1", False)]


def test_a_revision_of_something_local_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--revision v1"):
        open_checkpoint(str(tmp_path), revision="v1")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"neither a checkpoint folder nor a \.gguf file"):
        open_checkpoint(str(tmp_path / "model.safetensors"))
