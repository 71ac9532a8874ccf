"""The report, from made-up rounds: medians, what failed, what was left out; and the file in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from miniserve.benchmarks.peers import __main__ as command
from miniserve.benchmarks.peers.load import Figures, Workload
from miniserve.benchmarks.peers.probes import Speed
from miniserve.benchmarks.peers.report import markdown, rows
from miniserve.benchmarks.peers.results import Comparison, Turn, read_comparison, write_comparison
from miniserve.errors import ConfigError

LOAD = Workload(name="16 streams", streams=16, turns=1, prompt_tokens=128)
OTHER = Workload(name="1 stream", streams=1, turns=3, prompt_tokens=128)


def figures(rate: float, ttft: float | None = 0.25) -> Figures:
    return Figures(seconds=10.0, output_tokens_per_second=rate, ttft=ttft, itl=0.05, tpot=0.0625)


def turn(number: int, arm: str, rate: float | None, error: str = "") -> Turn:
    return Turn(
        "smollm2",
        number,
        arm,
        Speed(20.0 + number, 1.5),
        2.5,
        {} if rate is None else {LOAD.name: figures(rate)},
        {LOAD.name: error} if error else {},
    )


COMPARISON = Comparison(
    models=("smollm2",),
    arms=("miniserve", "llama-server", "vLLM"),
    workloads=(LOAD,),
    rounds=3,
    cores=(0, 1),
    versions={"llama.cpp": "0.3.36"},
    left_out={"smollm2": {"vLLM": "no build for this machine"}},
    turns=(
        *(turn(number, "miniserve", rate) for number, rate in enumerate((200.0, 100.0, 240.0), 1)),
        *(turn(number, "llama-server", rate) for number, rate in enumerate((50.0, 150.0), 1)),
        turn(3, "llama-server", None, "HTTP 500: out of\n memory"),
    ),
)


def test_a_row_has_the_medians_and_the_range() -> None:
    text = markdown(COMPARISON)
    assert "| miniserve | 200.0 (100.0 to 240.0) | 1.00 | 250 ms | 50.0 ms | 62.5 ms | 3 |" in text
    assert "| llama-server | 100.0 (50.0 to 150.0) | 0.50 | 250 ms | 50.0 ms | 62.5 ms | 2, 1 failed |" in text


def test_what_is_missing_is_told_with_its_reason() -> None:
    text = markdown(COMPARISON)
    assert "- vLLM was left out: no build for this machine" in text
    assert "- llama-server, round 3, 16 streams: HTTP 500: out of memory" in text
    assert "| vLLM |" not in text


def test_the_machine_beside_the_measurement() -> None:
    text = markdown(COMPARISON)
    assert "22.0 (21.0 to 23.0) GB/s read from memory, 1.50 (1.50 to 1.50) TFLOP/s" in text
    assert "Peers: llama.cpp from llama-cpp-python 0.3.36." in text


def test_an_arm_that_never_started_has_a_row() -> None:
    dead = replace(turn(1, "vLLM", None), errors={"": "exit code 1"})
    (row,) = rows(replace(COMPARISON, turns=(dead,)), "smollm2", LOAD)
    assert (row.arm, row.failures, row.median("ttft")) == ("vLLM", 1, None)
    assert "| vLLM | - | - | - | - | - | 0, 1 failed |" in markdown(replace(COMPARISON, turns=(dead,)))


def test_the_share_is_of_the_first_arm_that_was_measured() -> None:
    without = tuple(turn for turn in COMPARISON.turns if turn.arm != "miniserve")
    assert "| llama-server | 100.0 (50.0 to 150.0) | 1.00 |" in markdown(replace(COMPARISON, turns=without))


def test_nothing_measured() -> None:
    assert "Nothing was measured." in markdown(replace(COMPARISON, turns=()))


def test_a_comparison_survives_its_file(tmp_path: Path) -> None:
    write_comparison(tmp_path / "peers.json", COMPARISON)
    assert read_comparison(tmp_path / "peers.json") == COMPARISON


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"turns": 1}'])
def test_a_file_that_is_something_else(tmp_path: Path, text: str) -> None:
    (tmp_path / "peers.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="no result"):
        read_comparison(tmp_path / "peers.json")


def test_the_report_command_writes_tables_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = replace(COMPARISON, workloads=(LOAD, OTHER))
    write_comparison(tmp_path / command.NUMBERS, comparison)
    assert command.main(["report", "--out", str(tmp_path)]) == 1  # a round failed
    assert capsys.readouterr().out == (tmp_path / command.TABLES).read_text() == markdown(comparison)
    assert (tmp_path / command.PLOT).read_bytes().startswith(b"\x89PNG")


def test_a_report_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["report", "--out", str(tmp_path)]) == 2
    assert "peers.json" in capsys.readouterr().err


def test_a_run_without_a_setup_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", "--dir", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "run the command setup" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
