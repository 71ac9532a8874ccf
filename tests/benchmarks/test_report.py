"""The numbers of a benchmark, and the three ways they are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from miniserve.benchmarks import report
from miniserve.benchmarks.arm import Measurement
from miniserve.errors import ConfigError

PROMPTS = ((1,) * 30, (2,) * 10)
OURS = Measurement(PROMPTS, 2.0, (0.1, 0.3), (1.0, 2.0), 16, cached_tokens=10)
SLOWER = Measurement(PROMPTS, 4.0, (0.3, 0.5), (2.0, 4.0), 16, cached_tokens=10)
BASELINE = Measurement(PROMPTS, 5.0, (), (5.0, 5.0), 16, padded_prompt_tokens=60)
RESULTS = {"prefix cache": [OURS, SLOWER, OURS], "transformers": [BASELINE, BASELINE, BASELINE]}


def test_metrics_of_a_run() -> None:
    assert report.metrics(OURS) == {
        "seconds": 2.0,
        "requests_per_second": 1.0,
        "output_tokens_per_second": 8.0,
        "total_tokens_per_second": 28.0,
        "p50_ttft_seconds": 0.2,
        "p50_latency_seconds": 1.5,
        "p90_latency_seconds": pytest.approx(1.9),
        "cached_share": 0.25,
        "prompt_tokens": 40,
        "completion_tokens": 16,
        "cached_tokens": 10,
    }
    baseline = report.metrics(BASELINE)
    assert (baseline["p50_ttft_seconds"], baseline["padded_prompt_tokens"]) == (None, 60)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([7.0], 50, 7), ([7.0], 90, 7), ([3.0, 1.0, 2.0], 50, 2), ([1.0, 2.0], 50, 1.5), ([*range(11)], 90, 9)],
)
def test_percentile(values: list[float], percent: int, expected: float) -> None:
    assert report.percentile(values, percent) == expected


def test_medians_of_repeats() -> None:
    assert report.medians([OURS, SLOWER, SLOWER])["output_tokens_per_second"] == 4.0
    assert report.medians([OURS, SLOWER])["p50_ttft_seconds"] == pytest.approx(0.3)
    assert report.medians([BASELINE])["p50_ttft_seconds"] is None


def shown(results: report.Results) -> list[str]:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(report.table(results, "the title"))
    return capture.get().splitlines()


def test_table() -> None:
    lines = shown(RESULTS)
    assert lines[0].strip() == "the title" and lines[-1].strip() == "medians of 3 runs"
    [ours] = [line for line in lines if "prefix cache" in line]
    [baseline] = [line for line in lines if "transformers" in line]
    assert ours.split() == ["prefix", "cache", "1.00", "8.0", "28.0", "0.200s", "1.50s", "1.90s", "25%"]
    assert baseline.split() == ["transformers", "0.40", "3.2", "11.2", "-", "5.00s", "5.00s", "0%"]


def test_large_numbers_fit_into_a_terminal_of_80_columns() -> None:
    """Bug: the names of the arms had no room left."""
    large = Measurement(((1,) * 4000,) * 200, 10.5, (100.123,) * 200, (1000.0,) * 200, 12800)
    [line] = [line for line in shown({"no prefix cache": [large]}) if "no prefix cache" in line]
    assert line.split()[3:] == ["19.05", "1219.0", "77409.5", "100s", "1000s", "1000s", "0%"]


def test_json(tmp_path: Path) -> None:
    report.write_json(tmp_path / "numbers.json", RESULTS, {"num_prompts": 2})
    written = json.loads((tmp_path / "numbers.json").read_text())
    assert written["settings"] == {"num_prompts": 2}
    ours, baseline = written["arms"]["prefix cache"], written["arms"]["transformers"]
    assert [run["seconds"] for run in ours["runs"]] == [2.0, 4.0, 2.0]
    assert ours["seconds"] == 2.0 and "padded_prompt_tokens" not in ours
    assert baseline["padded_prompt_tokens"] == 60 and baseline["p50_ttft_seconds"] is None


def test_plot(tmp_path: Path) -> None:
    report.write_plot(tmp_path / "a.png", RESULTS, "the title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"--plot needs matplotlib.*uv sync"):
        report.check_can_plot()


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "folder"
    with pytest.raises(ConfigError, match="--json"):
        report.write_json(missing, RESULTS, {})
    with pytest.raises(ConfigError, match="--plot"):
        report.write_plot(missing, RESULTS, "the title")


@pytest.mark.parametrize("width", [50, 60, 80])
def test_numbers_are_never_split(width: int) -> None:
    """In a terminal of 60 columns, "1355.3" stood on two lines."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(report.table(RESULTS, "a title", width))
    words = capture.get().split()
    for values in map(report.medians, RESULTS.values()):
        for name in ("output_tokens_per_second", "p50_latency_seconds"):
            value, form = values[name], next(form for _, column, form in report.COLUMNS if column == name)
            assert value is not None and form(value) in words
    assert ("tot" in words) == (width >= report.FULL_WIDTH)
