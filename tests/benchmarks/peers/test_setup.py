"""The setup: what is complete is left alone, what fails is noted and keeps nothing else from being set up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from miniserve.benchmarks.peers import setup
from miniserve.benchmarks.peers.arms import ARMS, LLAMA, TRANSFORMERS, VLLM
from miniserve.benchmarks.peers.models import WRITERS, model_parts, part_name
from miniserve.benchmarks.peers.places import CHECKPOINT, Places
from miniserve.benchmarks.peers.setup import PEERS, Part, Shell, read_state, set_up
from miniserve.errors import ConfigError, StartupError


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "peers")


def counting(calls: list[str], name: str, version: str = "1", code: int = 0) -> Part:
    def make(shell: Shell) -> None:
        calls.append(name)
        shell.run(sys.executable, "-c", f"print('no compiler here'); raise SystemExit({code})")

    return Part(name, version, make)


def test_a_part_is_made_once(places: Places) -> None:
    calls: list[str] = []
    for version in ("1", "1", "2"):
        state = set_up([counting(calls, "a", version)], places, 1, lambda _: None)
        assert state.versions == {"a": version}
    assert calls == ["a", "a"]


def test_a_failure_is_noted_with_its_reason_and_the_next_part_is_made(places: Places) -> None:
    calls: list[str] = []
    state = set_up([counting(calls, "a", code=3), counting(calls, "b")], places, 1, lambda _: None)
    assert calls == ["a", "b"]
    assert state.versions == {"b": "1"}
    assert "no compiler here" in state.failures["a"]
    assert state.reason("b") is None
    assert "no compiler here" in str(state.reason("b", "a"))


def test_a_later_success_forgets_the_failure(places: Places) -> None:
    set_up([counting([], "a", code=3)], places, 1, lambda _: None)
    assert set_up([counting([], "a")], places, 1, lambda _: None).failures == {}


def test_what_is_not_set_up_says_how(places: Places) -> None:
    assert "run the command setup" in str(read_state(places).reason("a"))


def test_a_damaged_state(places: Places) -> None:
    places.folder.mkdir()
    places.state.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="delete it"):
        read_state(places)


def test_a_program_that_is_missing(places: Places) -> None:
    with pytest.raises(StartupError, match="no-such-program is not installed"):
        Shell(places, "a", 1, lambda _: None).run("no-such-program")


class Recorder(Shell):
    """Runs nothing."""

    def __init__(self, places: Places) -> None:
        super().__init__(places, "recorded", 3, lambda _: None)
        self.commands: list[list[str]] = []

    def run(self, *command: str | Path, environment: object = None) -> None:
        self.commands.append([str(word) for word in command])


def made(places: Places, name: str) -> list[list[str]]:
    shell = Recorder(places)
    places.peer(name).mkdir(parents=True, exist_ok=True)
    {part.name: part for part in PEERS}[name].make(shell)
    return shell.commands


@pytest.mark.parametrize("name", [VLLM, TRANSFORMERS])
def test_a_peer_is_installed_into_its_own_environment(places: Places, name: str) -> None:
    create, install = made(places, name)
    assert create[-1] == str(places.environment(name))
    assert install[install.index("--python") + 1] == str(places.python(name))
    assert any(word.endswith(f"=={setup.VERSIONS[name]}") for word in install)


def test_vllm_goes_without_libraries_for_images(places: Places) -> None:
    made(places, VLLM)
    assert "torchvision; python_version < '3'" in (places.peer(VLLM) / "overrides.txt").read_text().splitlines()


def test_llama_cpp_is_built_from_source_for_this_machine(places: Places) -> None:
    setup.llama_source(places).mkdir(parents=True)  # as downloaded before
    *_, configure, build = made(places, LLAMA)
    assert "-DGGML_NATIVE=ON" in configure
    assert build[build.index("--parallel") + 1] == "3"
    assert {"llama-server", "llama-bench"} <= set(build)


# The models


def test_what_a_model_is_made_of_comes_first() -> None:
    names = [part.name for part in model_parts(["smollm2"], [CHECKPOINT, "q8_0"])]
    assert names == ["smollm2", "smollm2-bf16", "smollm2-q8_0"]
    assert [part.name for part in model_parts(["smollm2"], [CHECKPOINT])] == ["smollm2"]


def test_every_arm_finds_its_model_among_the_parts() -> None:
    made = {part.name for part in model_parts(list(WRITERS), sorted({arm.form for arm in ARMS}))}
    assert {part_name(model, arm.form) for model in WRITERS for arm in ARMS} <= made


def test_a_checkpoint_is_complete_or_not_there(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(_shell: Shell, folder: Path) -> None:
        (folder / "config.json").write_text("{}", encoding="utf-8")
        raise OSError("the disk is full")

    monkeypatch.setitem(WRITERS, "smollm2", write_half)
    state = set_up(model_parts(["smollm2"], [CHECKPOINT]), places, 1, lambda _: None)
    assert state.failures == {"smollm2": "the disk is full"}
    assert not places.model("smollm2", CHECKPOINT).exists()


def test_a_gguf_file_appears_when_it_is_complete(places: Places) -> None:
    shell = Recorder(places)
    *_, quantized = model_parts(["smollm2"], ["q8_0"])
    target = places.model("smollm2", "q8_0")
    target.parent.mkdir(parents=True)
    target.with_suffix(".new.gguf").write_bytes(b"")
    quantized.make(shell)
    assert shell.commands[0][1:] == [str(places.model("smollm2", "bf16")), f"{target.with_suffix('')}.new.gguf", "Q8_0"]
    assert target.is_file()
