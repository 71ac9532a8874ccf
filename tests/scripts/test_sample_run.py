"""The sample run without a server: what it draws, sums up, checks, and how it replaces output/."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import socket
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from matplotlib.image import imsave
from matplotlib.patches import Rectangle

from demos import load_client
from demos.load_client import Load, Result
from scripts import sample_files, sample_run
from scripts.sample_files import INPUT, Artifact, artifacts, check_complete, publish, readme
from scripts.sample_load import LoadRun, Sample, run_load
from scripts.sample_pictures import find_program, ink_share, screenshot, trim, without_fonts
from scripts.sample_plots import load_figure, plot_load

LOAD = Load("http://127.0.0.1:9/v1", "scripted", requests=3)
RESULTS = [
    Result(0, sent_at=0.0, ttft=0.5, e2e=2.0, prompt_tokens=40, completion_tokens=10),
    Result(1, sent_at=1.0, e2e=0.1, error="http 500", message="no"),
    Result(2, sent_at=1.5, ttft=1.0, e2e=2.5, prompt_tokens=60, completion_tokens=10),
]
SAMPLES = [
    Sample(-0.1, 0, 0, 0, 100, 0, 0.0),
    Sample(0.15, 1, 0, 5, 100, 0, 1.0),
    Sample(2.0, 2, 3, 12, 100, 0, 5.0),
    Sample(4.1, 0, 0, 0, 100, 4, 2.0),
]
RUN = LoadRun(LOAD, RESULTS, 4.0, SAMPLES)
FILES = (Artifact("log.txt", "a log", "`serve`"), Artifact("page.png", "a page", "chromium", is_picture=True))


def names(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def folder_of(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name.replace("_", ".")).write_text(text)
    return path


# What a load leaves


def test_a_sample_takes_from_stats_what_changes() -> None:
    stats = {
        "model": "m",
        "running": 2,
        "waiting": 1,
        "kv_blocks_used": 3,
        "kv_blocks_total": 9,
        "preemptions": 5,
        "tokens_per_second": 7.5,
        "uptime_seconds": 1.0,
    }
    assert Sample.of(stats, 0.25) == Sample(0.25, 2, 1, 3, 9, 5, 7.5)


def test_a_load_is_written_as_lines_and_as_a_summary(tmp_path: Path) -> None:
    results, samples, summary = (tmp_path / name for name in ("results", "samples", "summary"))
    RUN.write(results, samples, summary)
    assert [json.loads(line)["index"] for line in results.read_text().splitlines()] == [0, 1, 2]
    assert [json.loads(line)["kv_blocks_used"] for line in samples.read_text().splitlines()] == [0, 5, 12, 0]
    text = summary.read_text()
    assert "succeeded 2, failed 1" in text
    assert "most KV blocks in use: 12 of 100 (12.0%)" in text
    assert "most requests running: 2, waiting: 3" in text
    assert "preemptions: 4" in text


def test_a_load_without_a_server_is_an_error() -> None:
    with pytest.raises(httpx.ConnectError):
        run_load(LOAD)


def test_the_command_of_a_load_asks_for_that_load() -> None:
    for load in (sample_run.SHORT_LOAD, sample_run.LONG_LOAD):
        program, *flags = shlex.split(sample_run.load_command(load))
        asked = load_client._parser().parse_args(flags)
        assert (sample_files.ROOT / program).exists()
        assert load_client._load(asked, load.base_url, load.model) == load


# The plot


def test_the_plot_shows_what_succeeded_and_all_samples() -> None:
    latency, cache, queue = load_figure("title", RESULTS, SAMPLES).axes
    patches = [patch for patch in latency.patches if isinstance(patch, Rectangle)]
    bars = [(bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()) for bar in patches]
    assert bars == [(1, 0.0, 0.5), (1, 0.5, 1.5), (3, 1.5, 1.0), (3, 2.5, 1.5)]  # row, start, length
    assert np.asarray(cache.lines[0].get_ydata()).tolist() == [0, 5, 12, 0]
    assert "of 100" in cache.get_title()
    assert [np.asarray(line.get_ydata()).tolist() for line in queue.lines] == [[0, 1, 2, 0], [0, 0, 3, 0]]
    assert latency.get_xlim() == cache.get_xlim() == queue.get_xlim() == (-0.1, 4.1)


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    plot_load(tmp_path / "load.png", "title", RESULTS, SAMPLES)
    assert 0.01 < ink_share(tmp_path / "load.png") < 0.9


# Pictures


def test_a_drawing_loses_its_fonts_and_has_areas_for_block_characters() -> None:
    face = '@font-face {\n font-family: "F";\n src: url("https://example.org/f.woff2");\n}\n'
    clip = 'clip-path="url(#c)"'
    bar = f'<text class="t-r3" x="0" y="116.1" textLength="12.2" {clip}>▊</text>'
    line = f'<text class="t-r4" x="12.2" y="18.5" textLength="24.4" {clip}>▁▁</text>'
    text = f'<text class="t-r5" x="0" y="18.5" textLength="24.4" {clip}>ab</text>'
    drawn = without_fonts(face + bar + line + text)
    assert drawn == (
        '<rect class="t-r3" x="0.00" y="97.60" width="9.15" height="24.65" shape-rendering="crispEdges"/>'
        '<rect class="t-r4" x="12.20" y="21.57" width="24.40" height="3.08" shape-rendering="crispEdges"/>' + text
    )


def test_an_empty_bottom_is_cut_off(tmp_path: Path) -> None:
    pixels = np.ones((50, 20, 3))
    pixels[3:10, 5:8] = 0
    imsave(tmp_path / "a.png", pixels)
    assert ink_share(tmp_path / "a.png") == pytest.approx(21 / 1000)
    trim(tmp_path / "a.png", 4)
    assert ink_share(tmp_path / "a.png") == pytest.approx(21 / (14 * 20))


@pytest.mark.parametrize(
    ("script", "problem"),
    [("cp {blank} {target}", "blank: 0.00%"), ("echo no display >&2; exit 3", "ended with 3: no display")],
)
def test_a_browser_that_draws_nothing_is_an_error(tmp_path: Path, script: str, problem: str) -> None:
    imsave(tmp_path / "blank.png", np.ones((9, 9, 3)))
    browser, target = tmp_path / "browser", tmp_path / "a.png"
    browser.write_text("#!/bin/sh\n" + script.format(blank=tmp_path / "blank.png", target=target))
    browser.chmod(0o755)
    with pytest.raises(ValueError, match=problem):
        screenshot(str(browser), "about:blank", target, (9, 9), 1.0)


def test_the_first_program_that_exists_is_taken() -> None:
    assert Path(find_program(("no-such-shell", "sh"), "dash", "--shell")).name == "sh"


# The files


def test_a_finished_run_replaces_what_it_made_and_keeps_the_rest(tmp_path: Path) -> None:
    output = folder_of(tmp_path / "output", kept_txt="kept", made_txt="old")
    folder_of(tmp_path / "output.new", left_txt="by a killed run")
    made = folder_of(tmp_path / "made", made_txt="new", more_txt="more")
    publish(made, output)
    assert names(output) == {"kept.txt": "kept", "made.txt": "new", "more.txt": "more"}
    assert {file.name for file in tmp_path.iterdir()} == {"output", "made"}


def test_a_file_that_cannot_be_copied_leaves_the_old_output(tmp_path: Path) -> None:
    output = folder_of(tmp_path / "output", made_txt="old")
    made = folder_of(tmp_path / "made", made_txt="new")
    (made / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match=r"gone\.txt"):
        publish(made, output)
    assert names(output) == {"made.txt": "old"}
    assert not (tmp_path / "output.new").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "did not make log.txt"), (f"loaded {sample_files.ROOT}/model.gguf", "log.txt names a folder of this")],
)
def test_what_is_missing_or_tells_too_much_is_an_error(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "log.txt").write_text(text)
    with pytest.raises(ValueError, match=problem):
        check_complete(tmp_path, FILES, with_pictures=False)


def test_a_picture_may_be_missing_only_when_none_were_asked_for(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("all is well")
    check_complete(tmp_path, FILES, with_pictures=False)
    with pytest.raises(ValueError, match=r"did not make page\.png"):
        check_complete(tmp_path, FILES, with_pictures=True)


def test_the_readme_tells_of_each_file_and_of_older_pictures() -> None:
    text = readme(FILES, with_pictures=True)
    assert "| [log.txt](log.txt) | a log | `serve` |" in text
    assert re.search(r"on \d{4}-\d\d-\d\d", text)
    assert "torch" in text
    assert "older" not in text
    assert "page.png are older" in readme(FILES, with_pictures=False)


# The command


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output/ of an earlier run."""
    path = folder_of(tmp_path / "output", tui_png="an old picture", load_txt="old")
    monkeypatch.setattr(sample_run, "OUTPUT", path)
    return path


def all_files() -> tuple[Artifact, ...]:
    return artifacts(*sample_run._commands())


def test_a_run_without_pictures_keeps_the_old_ones(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def record(folder: Path, port: int, programs: sample_run.Programs | None) -> None:
        assert programs is None
        for each in all_files():
            if not each.is_picture:
                (folder / each.name).write_text("new")

    monkeypatch.setattr(sample_run, "record", record)
    assert sample_run.main(["--skip-pictures"]) == 0
    assert names(output)["tui.png"] == "an old picture"
    assert names(output)["miniserve-serve.log"] == "new"
    assert "tui.png, prometheus-targets.png are older" in names(output)["README.md"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(all_files())  # one picture never was, README.md is
    assert [line.split()[2:] for line in lines if "skip-pictures" in line] == [
        ["output/tui.png", "(old:", "--skip-pictures)"]
    ]


@pytest.mark.parametrize(("error", "code"), [(ValueError("the server fell over"), 2), (KeyboardInterrupt(), 130)])
def test_a_broken_run_leaves_the_old_output(
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    def record(folder: Path, port: int, programs: sample_run.Programs | None) -> None:
        (folder / "load.txt").write_text("half")
        raise error

    monkeypatch.setattr(sample_run, "record", record)
    before = names(output)
    assert sample_run.main(["--skip-pictures"]) == code
    assert names(output) == before
    assert "output/ is as it was" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["chromium", "prometheus"])
def test_a_missing_program_is_told_before_anything_starts(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sample_run, "record", lambda *_: pytest.fail("the run began"))
    flags = [flag for name in ("chromium", "prometheus") for flag in (f"--{name}", "sh")]
    flags[flags.index(f"--{program}") + 1] = "/nowhere/it"
    assert sample_run.main(flags) == 2
    told = capsys.readouterr().err
    assert f"no program '/nowhere/it': install it (Debian: apt-get install {program})" in told
    assert "--skip-pictures" in told


def test_programs_are_found_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("google-chrome", "prometheus"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = sample_run.find_programs(argparse.Namespace(chromium=None, prometheus=None))
    assert found == sample_run.Programs(str(tmp_path / "google-chrome"), str(tmp_path / "prometheus"))


# What it sends, and keeps of the log


def test_the_kept_request_is_one_that_asks_for_the_likeliest_answer() -> None:
    body = json.loads((sample_files.OUTPUT / INPUT).read_text())
    assert body["model"] == sample_run.MODEL
    assert body["temperature"] == 0


def test_the_curl_command_survives_a_shell() -> None:
    body = json.dumps({"content": "it's 5 > 4 & $HOME"})
    assert shlex.split(sample_run.curl_command("http://h", body)) == [
        *("curl", "-N", "http://h/v1/chat/completions", "-H", "Content-Type: application/json", "-d"),
        body,
    ]


def test_the_log_is_kept_without_the_sampling() -> None:
    kept = '1 INFO 127.0.0.1:9 - "GET /v1/models HTTP/1.1" 200\n[miniserve] device cpu\n'
    assert sample_run.without_sampling('0 INFO 127.0.0.1:9 - "GET /stats HTTP/1.1" 200\n' + kept) == kept


def test_the_log_of_a_server_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was gone when the server had stopped, and the run with it."""
    fake = Path(__file__).parents[1] / "tui" / "fake_serve.py"
    monkeypatch.setattr(sample_run, "SERVE_COMMAND", (sys.executable, str(fake), "serve", str(tmp_path)))
    (tmp_path / "healthy").touch()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with sample_run.serving(f"http://127.0.0.1:{port}", tmp_path / "serve.log"):
        assert not (tmp_path / "serve.log").exists()
    assert "weights" in (tmp_path / "serve.log").read_text()
