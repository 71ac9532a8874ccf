"""The `bench` command: its arms and their turns, what it refuses before it measures, and one run of the real thing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from miniserve import cli
from miniserve.benchmarks import bench as bench_module
from miniserve.benchmarks import report
from miniserve.benchmarks.arm import Load, Measurement, Progress
from miniserve.benchmarks.bench import BenchOptions, bench
from miniserve.benchmarks.prompts import conversations
from miniserve.config import EngineConfig
from miniserve.errors import ConfigError, InternalError, RequestError
from tests.support import tiny_model

TOKEN_IDS = ((1, 2, 3), (1, 2))


class FakeWorker:
    """Notes who is started with what, and is done at once."""

    started: list[tuple[str, EngineConfig]]
    prompts: list[tuple[str, Any]]

    def __init__(self, name: str, _load: Load, config: EngineConfig, _max_tokens: int) -> None:
        self.name = name
        self.started.append((name, config))

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_until_loaded(self, progress: Progress | None) -> None:
        pass

    def run(self, prompts: Sequence[Any], progress: Progress | None) -> Measurement:
        self.prompts.append((self.name, prompts))
        if self.name == "broken":
            raise InternalError("broken: lost")
        return Measurement(TOKEN_IDS, 1.0, (0.5,), (1.0,), 4)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    FakeWorker.started, FakeWorker.prompts = [], []
    monkeypatch.setattr(bench_module, "Worker", FakeWorker)
    return FakeWorker


@contextmanager
def no_bar(_label: str) -> Iterator[None]:
    yield None


def test_arms_take_turns(workers: type[FakeWorker], capsys: pytest.CaptureFixture[str]) -> None:
    bench(EngineConfig(model="m", seed=7), BenchOptions(num_prompts=2, repeat=2, hf_baseline=True), no_bar)
    assert [name for name, _ in workers.started] == ["prefix cache", "no prefix cache", "transformers"] * 2
    assert [config.prefix_caching for _, config in workers.started[:2]] == [True, False]
    assert {config.seed for _, config in workers.started} == {7}
    assert "medians of 2 runs" in capsys.readouterr().out


def test_all_arms_get_the_same_tokens(workers: type[FakeWorker]) -> None:
    bench(EngineConfig(model="m"), BenchOptions(num_prompts=2, hf_baseline=True), no_bar)
    assert [prompts for _, prompts in workers.prompts] == [conversations(2), TOKEN_IDS, TOKEN_IDS]


@pytest.mark.parametrize(
    ("flags", "arms"),
    [
        ((), ["prefix cache", "no prefix cache"]),
        (("--prefix-caching",), ["prefix cache"]),
        (("--no-prefix-caching", "--hf-baseline"), ["no prefix cache", "transformers"]),
    ],
)
def test_flags_choose_the_arms(workers: type[FakeWorker], flags: tuple[str, ...], arms: list[str]) -> None:
    assert cli.main(["bench", "--model", "m", *flags]) == 0
    assert [name for name, _ in workers.started] == arms


def test_an_arm_that_fails_ends_the_command(
    workers: type[FakeWorker], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_module, "PREFIX_CACHE", "broken")
    assert cli.main(["bench", "--model", "m"]) == 1
    assert capsys.readouterr() == ("", "miniserve: error: broken: lost\n")
    assert len(workers.started) == 1


def test_more_tokens_than_the_context_holds_are_the_fault_of_a_flag(
    workers: type[FakeWorker], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended with exit code 1, as if the measurement had failed."""

    def run(*_: object) -> Measurement:
        raise RequestError("the context holds 2048")

    monkeypatch.setattr(workers, "run", run)
    assert cli.main(["bench", "--model", "m", "--max-tokens", "100000"]) == 2
    assert capsys.readouterr() == ("", "miniserve: error: the context holds 2048\n")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--num-prompts", "0"),
        ("--num-prompts", "many"),
        ("--max-tokens", "0"),
        ("--repeat", "-1"),
        ("--json", "/no/such/folder/a.json"),
        ("--json", "/"),
        ("--plot", "/no/such/folder/a.png"),
        ("--plot", "a.svg"),
    ],
)
def test_refused_before_anything_is_measured(
    workers: type[FakeWorker], capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    try:
        code = cli.main(["bench", "--model", "m", flag, value])
    except SystemExit as end:
        assert isinstance(end.code, int)
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out, workers.started) == (2, "", [])
    [line] = err.splitlines()
    assert ": error: " in line and flag in line and value in line


def test_one_file_for_both(workers: type[FakeWorker], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plot took the place of the JSON without a word."""
    path = str(tmp_path / "a.png")
    assert cli.main(["bench", "--model", "m", "--json", path, "--plot", path]) == 2
    assert "give each a file of its own" in capsys.readouterr().err
    assert not workers.started


def test_a_plot_without_matplotlib_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="matplotlib"):
        BenchOptions(plot=Path("a.png"))


def run_bench(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "main.py", "bench", *flags]
    root = Path(cli.__file__).parents[2]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=root)


def test_the_real_thing(tmp_path: Path) -> None:
    """Ours without its cache, and the baseline; the table means nothing on a tiny model."""
    tiny_model(tmp_path, "qwen3", max_position_embeddings=4096)
    numbers, plot = tmp_path / "numbers.json", tmp_path / "plot.png"
    result = run_bench(
        *("--model", str(tmp_path), "--num-prompts", "2", "--max-tokens", "2", "--threads", "1", "--num-kv-blocks=600"),
        *("--no-prefix-caching", "--hf-baseline", "--json", str(numbers), "--plot", str(plot)),
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "no prefix cache" in result.stdout and "transformers" in result.stdout
    arms = json.loads(numbers.read_text())["arms"]
    ours, baseline = arms["no prefix cache"], arms["transformers"]
    assert ours["prompt_tokens"] == baseline["prompt_tokens"] < baseline["padded_prompt_tokens"]
    assert ours["completion_tokens"] == baseline["completion_tokens"] == 4
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_model_that_is_not_there() -> None:
    result = run_bench("--model", "./nowhere")
    assert (result.returncode, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("miniserve: error: prefix cache: ") and "nowhere" in line
