"""Where the peers, the models and the logs are: one folder outside of the project, which may be deleted at any time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

CHECKPOINT = "checkpoint"  # a Hugging Face folder; other forms are GGUF types


def default_folder() -> Path:
    """$XDG_CACHE_HOME/miniserve-peers, or its like on other systems."""
    return platformdirs.user_cache_path("miniserve-peers")


@dataclass(frozen=True, slots=True)
class Places:
    """The paths within `folder`, which is absolute."""

    folder: Path

    @property
    def state(self) -> Path:
        """What is set up, and what could not be; JSON."""
        return self.folder / "state.json"

    @property
    def logs(self) -> Path:
        """Of each command of the setup and each server."""
        return self.folder / "logs"

    def peer(self, name: str) -> Path:
        """Everything that belongs to one peer."""
        return self.folder / name

    def environment(self, name: str) -> Path:
        """The Python environment of a peer."""
        return self.peer(name) / "venv"

    def python(self, name: str) -> Path:
        """The interpreter of that environment."""
        return self.environment(name) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    @property
    def llama_programs(self) -> Path:
        """The folder of what was built from llama.cpp."""
        return self.peer("llama.cpp") / "build" / "bin"

    def model(self, model: str, form: str) -> Path:
        """A model as `CHECKPOINT` or as a GGUF file of a type such as "bf16" or "q8_0"."""
        models = self.folder / "models"
        return models / model if form == CHECKPOINT else models / f"{model}-{form}.gguf"
