"""Each demo that wants a server, run as a script is run, against one whose answers the prompts direct."""

from __future__ import annotations

import json
import math
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.demos.listening import listening

DEMOS = Path(__file__).parents[2] / "demos"
NAMES = ("streaming", "prefix_cache", "continuous_batching", "preemption", "logprobs", "seeds", "abort")
NOBODY = "http://127.0.0.1:9/v1"


class Demo:
    """Runs demos as `python demos/NAME.py ARGUMENTS` would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        monkeypatch.setenv("COLUMNS", "100")

    def __call__(self, name: str, *arguments: str) -> tuple[str, str | int | None]:
        """What was printed, and what the process exits with: None or 0 for success, or its last words."""
        path = str(DEMOS / f"{name}.py")
        self._monkeypatch.setattr(sys, "argv", [path, *arguments])
        code: str | int | None = None
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            code = end.code
        return self._capsys.readouterr().out, code


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Demo:
    return Demo(monkeypatch, capsys)


def test_streaming_prints_the_whole_answer_and_when_it_came(demo: Demo, server: str) -> None:
    printed, code = demo("streaming", f"{server}/v1", "<<say It rains.>>")
    assert code is None
    assert printed.startswith("It rains.\n")
    assert re.search(r"^10 tokens in [1-9] pieces$", printed, re.MULTILINE)  # a slow reader's pieces are merged
    assert re.search(r"first piece after \d+\.\d{3} s", printed) and "inter-token latency" in printed


def test_streaming_of_an_empty_answer_says_so(demo: Demo, server: str) -> None:
    _, code = demo("streaming", f"{server}/v1", "<<say >>")
    assert code == "the model had nothing to say; try another prompt"


def test_prefix_cache_serves_the_same_beginning_and_nothing_after_a_difference(demo: Demo, server: str) -> None:
    printed, code = demo("prefix_cache", f"{server}/v1")
    assert code is None
    rows = re.findall(r"│ (first of all|same beginning|other first word) +│ +(\d+) +│ +(\d+) ", printed)
    assert [name for name, _, _ in rows] == ["first of all", "same beginning", "same beginning", "other first word"]
    cached = [int(number) for _, _, number in rows]
    assert cached[0] == cached[3] == 0
    # 16 tokens a block, one token a byte: all whole blocks of the system message
    assert cached[1] == cached[2] and cached[1] % 16 == 0 and 1200 < cached[1] < int(rows[1][1])


def test_continuous_batching_lets_the_late_short_request_end_first(demo: Demo, server: str) -> None:
    printed, code = demo("continuous_batching", f"{server}/v1", "<<pause 2>>")
    assert code is None
    ends = re.findall(r"^  (\w+(?: \d)?) +sent at +([\d.]+) s, ended at +([\d.]+) s$", printed, re.MULTILINE)
    names = [name for name, _, _ in ends]
    assert names[0] == "short" and sorted(names) == ["long 1", "long 2", "long 3", "short"]
    assert max(float(sent) for _, sent, _ in ends) == float(ends[0][1])


def test_preemption_happens_and_the_answers_do_not_tell(demo: Demo, tiny_server: str) -> None:
    printed, code = demo("preemption", f"{tiny_server}/v1", "<<pause 3>>")
    assert code is None
    assert printed.count(": the same answer\n") == 4
    last = re.search(r"^Preemptions: (\d+); the", printed, re.MULTILINE)
    assert last and int(last[1]) == httpx.get(f"{tiny_server}/stats").json()["preemptions"] > 0
    assert re.search(r"waiting [1-4], +\d+ of 15 blocks used", printed)


def test_preemption_names_the_flags_where_the_pool_is_large(demo: Demo, server: str) -> None:
    printed, code = demo("preemption", f"{server}/v1")
    assert printed == "" and isinstance(code, str)  # at once: nothing was asked
    assert code.startswith("the pool has ") and "--num-kv-blocks 16 --dtype float32" in code


def test_logprobs_are_coloured_and_the_closest_decisions_listed(
    demo: Demo, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    printed, code = demo("logprobs", f"{server}/v1", "<<say [ab]>>")
    assert code is None
    assert "\x1b[31m[" in printed  # the script is sure of nothing: 37 %, red; and [ab] is text, no markup
    plain = re.sub(r"\x1b\[[\d;]*m", "", printed)
    assert plain.startswith("[ab]") and "'b' 37%, 'c' 14%, 'd' 5%" in plain
    assert "5 tokens; perplexity 2.72" in plain


@pytest.mark.parametrize(
    ("probability", "style"), [(1.0, "green"), (0.91, "green"), (0.6, "yellow"), (0.4, "red"), (0.0, "red")]
)
def test_logprobs_colours_follow_the_probability(probability: float, style: str) -> None:
    colour = runpy.run_path(str(DEMOS / "logprobs.py"))["colour"]
    assert colour(math.log(probability) if probability else -9999.0) == style


def test_seeds_compares_the_answers(demo: Demo, server: str) -> None:
    printed, code = demo("seeds", f"{server}/v1", "<<say three>>")
    assert code is None
    assert re.findall(r"│ (1|2|none) +│ three +│ (yes|no) ", printed) == [
        (seed, "yes") for seed in ("1", "1", "2", "none", "none")
    ]
    assert printed.endswith("One seed, one answer.\n")


def test_abort_stops_both_kinds_of_request(demo: Demo, server: str) -> None:
    before = httpx.get(f"{server}/stats").json()["requests_finished"]
    printed, code = demo("abort", f"{server}/v1", "<<pause 5>><<endless>>")
    assert code is None
    made = re.findall(r"running 0, KV blocks used 0, (\d+) tokens in all", printed)
    streamed, plain = map(int, made)
    assert 9 <= streamed < 1000 and plain < 1000
    after = httpx.get(f"{server}/stats").json()["requests_finished"]
    assert after == {**before, "abort": before["abort"] + 2}


@pytest.mark.parametrize("name", NAMES)
def test_a_demo_without_a_server_says_how_to_start_one(demo: Demo, name: str) -> None:
    printed, code = demo(name, NOBODY)
    assert printed == "" and isinstance(code, str)
    assert code.startswith(f"no server at {NOBODY}; start one: uv run main.py serve --model smollm2")


class Leaving(BaseHTTPRequestHandler):
    """Knows its model and its statistics, and hangs up on who asks for an answer."""

    def do_GET(self) -> None:
        """What a demo asks for first."""
        idle = {"kv_blocks_total": 15, "preemptions": 0, "running": 0, "waiting": 0, "generation_tokens_total": 0}
        self._begin(json.dumps({"data": [{"id": "any"}], **idle}).encode())

    def do_POST(self) -> None:
        """The beginning of an answer, of which there is more."""
        piece = b'data: {"choices": [{"delta": {"content": "It"}}]}\n\n'
        self._begin(piece, length=1000)

    def _begin(self, body: bytes, length: int | None = None) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.send_response(200)
        self.send_header("Content-Type", "application/json" if length is None else "text/event-stream")
        self.send_header("Content-Length", str(length or len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def leaving() -> Iterator[str]:
    with listening(Leaving) as url:
        yield url


@pytest.mark.parametrize("name", NAMES)
def test_a_server_that_goes_away_is_no_traceback(demo: Demo, leaving: str, name: str) -> None:
    printed, code = demo(name, leaving)
    assert isinstance(code, str) and code.startswith("the connection broke: ") and "\n" not in code
    assert printed.endswith("\n")


@pytest.mark.parametrize("name", NAMES)
def test_a_url_without_v1_is_named_with_what_it_answers(demo: Demo, server: str, name: str) -> None:
    _, code = demo(name, server)
    assert isinstance(code, str) and code.startswith(server) and "answers 404: " in code and "/v1" in code
    assert "\n" not in code and "{" not in code


@pytest.mark.parametrize("name", NAMES)
def test_a_url_with_a_bad_port_is_named(demo: Demo, name: str) -> None:
    _, code = demo(name, "http://127.0.0.1:notaport/v1")
    assert isinstance(code, str) and code.startswith("http://127.0.0.1:notaport/v1 is no URL of a server: ")


@pytest.mark.parametrize("name", NAMES)
def test_help_is_a_usage_line(demo: Demo, name: str) -> None:
    printed, code = demo(name, "--help")
    assert code is None and printed.startswith(f"usage: uv run demos/{name}.py [base-url]")


@pytest.mark.parametrize("name", ["streaming", "continuous_batching"])
def test_an_interrupted_demo_is_quiet(server: str, name: str) -> None:
    command = [sys.executable, "-u", str(DEMOS / f"{name}.py"), f"{server}/v1", "<<pause 20>><<endless>>"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            while httpx.get(f"{server}/stats").json()["running"] == 0 and process.poll() is None:
                pass
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=30)[1]
        finally:
            process.kill()
    assert (process.returncode, said) == (130, "")


@pytest.mark.parametrize("name", NAMES)
def test_a_demo_is_short_and_says_what_to_look_at(name: str) -> None:
    source = (DEMOS / f"{name}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 80
    assert "What to look at:" in source and f"uv run demos/{name}.py [base-url]" in source
