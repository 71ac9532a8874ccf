"""Compiles the kernels for this machine, once, into the user's cache.

The file's name is a hash of everything that it depends on: the sources, the compiler, torch, and the instruction set.
Two processes that start together build it once. Needs a C++20 compiler with OpenMP; says so where there is none.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from miniserve.errors import KernelBuildError

SOURCES = Path(__file__).with_name("csrc")
# gcc and clang. No fast-math: results must not depend on what the compiler thinks is equal.
# Loops begin with a cache line: else they are some percent faster or slower by what is linked before them.
_ALIGNED = ("-falign-functions=64", "-falign-loops=64")
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden", "-w", *_ALIGNED)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni")
INSTRUCTION_SET_FLAGS = {
    "amx": (*_AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": (),
}
_COMPILE_SECONDS = 600
_REMEDY = "install g++ or clang++ (Debian: apt install g++), or start with --kernels torch"

_LOCK_SECONDS = 2 * _COMPILE_SECONDS

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Library:
    """A compiled library.

    Attributes:
        path: the file.
        namespace: of its operators in `torch.ops`. Its own, so that one process can load several.
    """

    path: Path
    namespace: str


def build(instruction_set: str, *, progress: Progress) -> Library:
    """The compiled library for `instruction_set`, from the cache or made now.

    Args:
        instruction_set: a key of INSTRUCTION_SET_FLAGS.
        progress: told what happens, where it takes time.

    Raises:
        KernelBuildError: there is no compiler, or it failed.
    """
    compiler = _compiler()
    folder = _cache_folder()
    name = f"{instruction_set}_{_key(compiler, instruction_set)}"
    library = Library(folder / f"{name}.so", f"miniserve_{name}")
    if library.path.exists():
        return library
    try:
        with FileLock(library.path.with_suffix(".lock"), timeout=_LOCK_SECONDS):
            if not library.path.exists():  # another process may have built it meanwhile
                progress(f"compiling the {instruction_set} kernels, once for this machine")
                _compile(compiler, INSTRUCTION_SET_FLAGS[instruction_set], library)
    except Timeout as error:
        raise KernelBuildError(f"another process has been compiling for too long: {error}") from error
    except OSError as error:
        raise _cannot_be_kept(folder, error) from error
    return library


def _cache_folder() -> Path:
    from platformdirs import user_cache_path  # not on every machine that needs no kernels

    folder = user_cache_path("miniserve") / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_be_kept(folder, error) from error
    return folder


def _cannot_be_kept(folder: Path, error: OSError) -> KernelBuildError:
    return KernelBuildError(
        f"the kernels cannot be kept in {folder}: {error.strerror}; set XDG_CACHE_HOME to a folder that can be "
        "written, or start with --kernels torch"
    )


def _compiler() -> str:
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found is not None:
            return found
    missing = f"$CXX names {asked}, which is not there" if asked else "there is no C++ compiler"
    raise KernelBuildError(f"{missing}: {_REMEDY}")


def _key(compiler: str, instruction_set: str) -> str:
    digest = hashlib.blake2b(digest_size=8)
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    flags = " ".join((*_FLAGS, *INSTRUCTION_SET_FLAGS[instruction_set]))
    for part in (compiler.encode(), version, torch.__version__.encode(), platform.machine().encode(), flags.encode()):
        digest.update(part + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def _compile(compiler: str, flags: tuple[str, ...], library: Library) -> None:
    """Compile each source by itself, side by side, link, and move the result into its place."""
    torch_folder = Path(torch.__file__).parent
    defined = (f"-DMINISERVE_NAMESPACE={library.namespace}", f"-I{torch_folder / 'include'}")
    with tempfile.TemporaryDirectory(dir=library.path.parent) as temporary:

        def compile_source(source: Path) -> Path:
            compiled = Path(temporary) / f"{source.stem}.o"
            _run(compiler, *_FLAGS, *flags, *defined, "-c", source, "-o", compiled)
            return compiled

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_source, sorted(SOURCES.glob("*.cpp"))))
        linked = Path(temporary) / library.path.name
        libraries = (f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10")
        _run(compiler, "-shared", *objects, "-o", linked, *libraries, *_torch_openmp(torch_folder))
        linked.replace(library.path)


def _torch_openmp(torch_folder: Path) -> tuple[Path, ...]:
    """The OpenMP runtime that torch itself has loaded: with a second one, the two would fight for the cores."""
    candidates = [*(torch_folder / "lib").glob("lib*omp*"), *torch_folder.parent.glob("torch.libs/lib*omp*")]
    found = sorted(path for path in candidates if path.name.startswith(("libgomp", "libomp", "libiomp5")))
    return tuple(found[:1])


def _run(*command: str | Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"{command[0]} did not finish: {error}; {_REMEDY}") from error
    if done.returncode != 0:
        lines = done.stderr.splitlines() or ["no output"]
        line = next((line for line in lines if "error" in line), lines[0])
        raise KernelBuildError(f"{command[0]} failed: {line[:300]}; {_REMEDY}")
