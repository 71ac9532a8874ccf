"""Building: once, for what it depends on, and never half. The compiler is played by a script that counts its calls."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from miniserve.errors import ConfigError, KernelBuildError
from miniserve.kernels import build as build_module
from miniserve.kernels.build import SOURCES, build
from miniserve.kernels.load import FORCE_VARIABLE, load, load_kernels

NUM_SOURCES = len(list(SOURCES.glob("*.cpp")))
# Logs what it is called for, writes what it is to write, and does what a file beside it says: fail, or wait.
COMPILER = """#!/bin/sh
here=$(dirname "$0")
if [ "$1" = --version ]; then cat "$here/version"; exit 0; fi
while [ $# -gt 0 ]; do
  [ "$1" = -o ] && out=$2
  [ "$1" = -shared ] && link=1
  shift
done
echo "${link:-0}" >> "$here/calls"
echo half > "$out"
if [ -e "$here/fail" ]; then echo "kernels.h:1: error: no such thing" >&2; exit 1; fi
while [ -n "$link" ] && [ -e "$here/wait" ]; do sleep 0.05; done
echo whole > "$out"
"""


class FakeCompiler:
    """What $CXX names."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.path = folder / "g++"
        self.path.write_text(COMPILER)
        self.path.chmod(0o755)
        (folder / "version").write_text("1.0")

    def set(self, name: str, text: str = "") -> None:
        (self.path.parent / name).write_text(text)

    def unset(self, name: str) -> None:
        (self.path.parent / name).unlink()

    @property
    def calls(self) -> int:
        """Of the compiler, so far, whatever for."""
        log = self.path.parent / "calls"
        return len(log.read_text().splitlines()) if log.exists() else 0

    @property
    def links(self) -> int:
        log = self.path.parent / "calls"
        return log.read_text().count("1") if log.exists() else 0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "miniserve" / "kernels"


@pytest.fixture
def compiler(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    fake = FakeCompiler(tmp_path / "bin")
    monkeypatch.setenv("CXX", str(fake.path))
    return fake


def ignore(_line: str) -> None:
    """Progress that nobody reads."""


# --- the cache ---


def test_built_once(compiler: FakeCompiler, cache: Path) -> None:
    lines: list[str] = []
    library = build("portable", progress=lines.append)
    assert library.path.parent == cache and library.path.read_text() == "whole\n"
    assert compiler.calls == NUM_SOURCES + 1
    assert build("portable", progress=lines.append) == library
    assert compiler.calls == NUM_SOURCES + 1
    assert lines == ["compiling the portable kernels, once for this machine"]
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".so"]


def test_what_makes_another_library(compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source, a flag, the instruction set, the compiler and its version, torch: each is in the name."""
    libraries = [build("portable", progress=ignore), build("avx2", progress=ignore)]

    def changed(change: Callable[[], object]) -> None:
        change()
        libraries.append(build("portable", progress=ignore))

    sources = tmp_path / "csrc"
    shutil.copytree(SOURCES, sources)
    monkeypatch.setattr(build_module, "SOURCES", sources)
    assert build("portable", progress=ignore) == libraries[0], "where the sources lie makes no difference"
    changed(lambda: (sources / "tile.h").write_text((sources / "tile.h").read_text() + " "))
    changed(lambda: (sources / "linear.cpp").rename(sources / "product.cpp"))
    changed(lambda: monkeypatch.setattr(build_module, "_FLAGS", (*build_module._FLAGS, "-g")))
    changed(lambda: compiler.set("version", "1.1"))
    changed(lambda: monkeypatch.setattr("torch.__version__", "99"))
    other = FakeCompiler(tmp_path / "other")
    changed(lambda: monkeypatch.setenv("CXX", str(other.path)))
    assert len(set(libraries)) == len(libraries)
    assert (compiler.calls, other.calls) == (7 * (NUM_SOURCES + 1), NUM_SOURCES + 1)


def test_a_failed_build_leaves_nothing(compiler: FakeCompiler, cache: Path) -> None:
    compiler.set("fail")
    with pytest.raises(KernelBuildError):
        build("portable", progress=ignore)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    compiler.unset("fail")
    assert build("portable", progress=ignore).path.read_text() == "whole\n"


BUILD = "from miniserve.kernels.build import build; print(build('portable', progress=lambda line: None).path)"


def start_building() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.skipif(sys.platform == "win32", reason="sessions of processes")
def test_an_interrupted_build_and_two_at_once(compiler: FakeCompiler, cache: Path) -> None:
    """The first process is killed while it links; then two come at the same time, and one of them builds."""
    compiler.set("wait")
    first = start_building()
    while compiler.links == 0:
        assert first.poll() is None
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert not list(cache.glob("*.so"))
    compiler.unset("wait")
    before = compiler.calls
    both = [start_building() for _ in range(2)]
    answers = {Path(process.communicate()[0].strip()) for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert {library.read_text() for library in answers} == {"whole\n"} and len(answers) == 1
    assert compiler.calls - before == NUM_SOURCES + 1


# --- what goes wrong ---


def check_error(match: str) -> None:
    """With native an error, with auto a reason, both with the remedy."""
    with pytest.raises(KernelBuildError, match=match) as caught:
        load_kernels("native", ("portable",), progress=ignore)
    assert "--kernels torch" in str(caught.value) and "\n" not in str(caught.value)
    choice = load_kernels("auto", ("portable",), progress=ignore)
    assert choice.kernels is None
    assert choice.reason == f"native kernels are passed over: {caught.value}"


@pytest.mark.usefixtures("cache")
def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    check_error(r"^\$CXX names /nonexistent, which is not there: install g\+\+")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    check_error(r"^there is no C\+\+ compiler: install g\+\+")


def test_the_compiler_of_the_path(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", f"{compiler.path.parent}:/usr/bin:/bin")
    build("portable", progress=ignore)
    assert compiler.calls == NUM_SOURCES + 1


def test_a_compiler_that_fails(compiler: FakeCompiler) -> None:
    compiler.set("fail")
    check_error(rf"^{re.escape(str(compiler.path))} failed: kernels.h:1: error: no such thing; install g\+\+")


def test_a_library_that_cannot_be_loaded(compiler: FakeCompiler, cache: Path) -> None:
    """Such as one that was cut off by a full disk: it says which file to delete."""
    check_error(rf"^{re.escape(str(cache))}.*\.so cannot be loaded: .*; delete it")
    with pytest.raises(KernelBuildError, match="cannot be loaded"):
        load("portable", progress=ignore)


@pytest.mark.skipif(sys.platform != "linux", reason="a folder that nobody can write to, root included")
@pytest.mark.usefixtures("compiler")
def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    """Bug: a cache folder that was there and read-only ended in a traceback, also with auto."""
    cache.parent.mkdir(parents=True)
    cache.symlink_to("/sys/kernel")
    check_error(rf"^the kernels cannot be kept in {re.escape(str(cache))}: .*XDG_CACHE_HOME")


@pytest.mark.usefixtures("compiler")
def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    check_error(r"^the kernels cannot be kept in .*cache/miniserve/kernels: .*XDG_CACHE_HOME")


# --- which instruction set ---


def test_torch_builds_nothing(compiler: FakeCompiler) -> None:
    choice = load_kernels("torch", ("portable",), progress=ignore)
    assert (choice.kernels, choice.reason, compiler.calls) == (None, None, 0)


def test_the_best_instruction_set_is_taken(compiler: FakeCompiler, cache: Path) -> None:
    load_kernels("auto", ("avx2", "portable"), progress=ignore)
    assert [path.name.split("_")[0] for path in cache.glob("*.so")] == ["avx2"]


def test_an_instruction_set_can_be_forced(compiler: FakeCompiler, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE_VARIABLE, "portable")
    load_kernels("auto", ("avx2", "portable"), progress=ignore)
    assert [path.name.split("_")[0] for path in cache.glob("*.so")] == ["portable"]


@pytest.mark.parametrize("forced", ["amx", "sse9", ""])
def test_an_instruction_set_that_is_not_there(monkeypatch: pytest.MonkeyPatch, forced: str) -> None:
    monkeypatch.setenv(FORCE_VARIABLE, forced)
    with pytest.raises(ConfigError, match=rf"{FORCE_VARIABLE} is '{forced}'; this machine has avx2, portable"):
        load_kernels("auto", ("avx2", "portable"), progress=ignore)
