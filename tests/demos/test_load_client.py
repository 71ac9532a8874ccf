from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from demos import load_client
from demos.load_client import Load, Result, main, percentile
from tests.demos.listening import listening

ROOT = Path(__file__).parents[2]


def make_load(**options: Any) -> Load:
    return Load("http://127.0.0.1:9/v1", "scripted", **options)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# The plan


@pytest.mark.parametrize("num_chars", [13, 14, 100, 4500])
def test_prompts_have_the_asked_length_and_differ_from_their_first_characters_on(num_chars: int) -> None:
    load = make_load(requests=500, prompt_chars=num_chars)
    prompts = [load.prompt(index) for index in range(load.requests)]
    assert {len(prompt) for prompt in prompts} == {num_chars}
    assert len({prompt[:8] for prompt in prompts}) == 500
    other = make_load(seed=1, prompt_chars=num_chars)
    assert other.prompt(0)[:8] != prompts[0][:8]
    assert [load.prompt(index) for index in range(500)] == prompts


def test_shared_characters_are_the_same_and_no_more() -> None:
    load = make_load(prompt_chars=100, shared_chars=40)
    first, second = load.prompt(0), load.prompt(1)
    assert first[:40] == second[:40] and first[40:48] != second[40:48]
    assert (len(first), len(second)) == (100, 100)
    same = make_load(prompt_chars=40, shared_chars=40)
    assert same.prompt(0) == same.prompt(1) and len(same.prompt(0)) == 40


def test_arrivals_are_a_poisson_process() -> None:
    times = make_load(requests=4001, gap=0.5, seed=3).arrivals()
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert times[0] == 0 and min(gaps) >= 0
    assert mean == pytest.approx(0.5, rel=0.05) and deviation == pytest.approx(0.5, rel=0.07)
    assert make_load(requests=3, gap=0).arrivals() == [0, 0, 0]


def test_percentiles_are_values_that_were_measured() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, percent) for percent in (0, 20, 50, 90, 100)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    assert percentile([7.0], 50) == 7.0


def test_time_per_output_token_leaves_out_the_first() -> None:
    result = Result(0, 0.0, ttft=1.0, e2e=3.0, completion_tokens=5)
    assert result.tpot == 0.5
    result.completion_tokens = 1
    assert result.tpot is None


# Against a server


def test_the_lines_add_up_with_the_servers_own_counts(server: str, tmp_path: Path) -> None:
    before = httpx.get(f"{server}/stats").json()
    out = tmp_path / "run.jsonl"
    command = [sys.executable, "demos/load_client.py", f"{server}/v1", "--requests", "10", "--out", str(out)]
    variables = {"LOAD_GAP": "0.01", "LOAD_PROMPT_CHARS": "100", "LOAD_MAX_TOKENS": "9", "LOAD_REQUESTS": "3"}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    after = httpx.get(f"{server}/stats").json()
    lines = read(out)
    assert sorted(line["index"] for line in lines) == list(range(10))
    assert {(line["error"], line["finish_reason"], line["cached_tokens"]) for line in lines} == {(None, "length", 0)}
    prompt_tokens = sum(line["prompt_tokens"] for line in lines)
    output_tokens = sum(line["completion_tokens"] for line in lines)
    assert (prompt_tokens, output_tokens) == (1000, 90)
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == prompt_tokens
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == output_tokens
    assert after["requests_finished"]["length"] - before["requests_finished"]["length"] == 10
    assert "succeeded 10, failed 0" in done.stdout and "mean gap 0.01 s" in done.stdout
    assert "prompt tokens 1000 (cached 0), output tokens 90" in done.stdout


def test_times_of_a_request_fit_together(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.jsonl"
    flags = ["--requests", "4", "--gap", "0", "--prompt-chars", "20", "--max-tokens", "12", "--ignore-eos"]
    assert main([f"{server}/v1", *flags, "--out", str(out)]) == 0
    for line in read(out):
        assert 0 < line["ttft"] <= line["e2e"] and len(line["itl"]) < 12
        assert line["ttft"] + sum(line["itl"]) <= line["e2e"] + 1e-4
        assert line["tpot"] == pytest.approx((line["e2e"] - line["ttft"]) / 11, abs=1e-5)
        assert line["request_id"]
    table = re.findall(r"│ (TTFT|ITL|TPOT|E2E) +│((?: +[\d.]+ │){6})", capsys.readouterr().out)
    assert [name for name, _ in table] == ["TTFT", "ITL", "TPOT", "E2E"]
    for _, cells in table:
        p50, p90, p95, p99, largest = [float(cell) for cell in cells.split("│")[1:6]]
        assert 0 <= p50 <= p90 <= p95 <= p99 <= largest


def test_a_closed_loop_keeps_to_its_concurrency(server: str, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    flags = ["--requests", "9", "--concurrency", "3", "--prompt-chars", "40", "--max-tokens", "10", "--out", str(out)]
    assert main([f"{server}/v1", *flags]) == 0
    lines = sorted(read(out), key=lambda line: line["sent_at"])
    assert len(lines) == 9
    for line in lines:
        now = line["sent_at"]
        running = [other for other in lines if other["sent_at"] <= now < other["sent_at"] + other["e2e"] - 1e-4]
        assert 1 <= len(running) <= 3
    assert sum(line["sent_at"] < min(other["e2e"] for other in lines) for line in lines) >= 3


def test_shared_beginnings_come_from_the_cache(server: str, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    flags = ["--requests", "3", "--concurrency", "1", "--prompt-chars", "200", "--shared-chars", "100"]
    assert main([f"{server}/v1", *flags, "--max-tokens", "1", "--out", str(out)]) == 0
    assert [line["cached_tokens"] for line in read(out)] == [0, 96, 96]  # whole blocks of 16; a token is a byte


def test_a_seed_makes_the_same_prompts_and_another_run_has_others(server: str, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    flags = [f"{server}/v1", "--requests", "1", "--prompt-chars", "65", "--max-tokens", "1", "--out", str(out)]
    cached = []
    for more in (["--seed", "7"], ["--seed", "7"], [], []):
        assert main([*flags, *more]) == 0
        cached += [line["cached_tokens"] for line in read(out)]
    assert cached == [0, 64, 0, 0]


def test_conversations_can_be_asked_too(server: str, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    flags = ["--chat", "--requests", "2", "--gap", "0", "--prompt-chars", "50", "--max-tokens", "5"]
    assert main([f"{server}/v1", *flags, "--out", str(out)]) == 0
    for line in read(out):
        assert (line["prompt_tokens"], line["completion_tokens"]) == (len("user: \n") + 50, 5)
        assert line["ttft"] is not None


# What goes wrong


class Faulty(BaseHTTPRequestHandler):
    """Answers with the fault that the model's name asks for."""

    faults: ClassVar[dict[str, tuple[int, bytes]]] = {
        "busy": (429, b'{"error": {"message": "come back later"}}'),
        "failing": (200, b'data: {"choices": [{"text": "a"}]}\n\ndata: {"error": {"message": "broke"}}\n\n'),
        "garbled": (200, b"data: {{{\n\n"),
        "strange": (200, b'data: {"choices": ["a"]}\n\n'),
        "cut": (200, b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\n'),
        "endless": (200, b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'),
        "slow": (200, b""),
        "mute": (0, b""),
    }

    def do_POST(self) -> None:
        """A fault."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = self.faults[body["model"]]
        if body["model"] == "slow":
            time.sleep(1.5)
        if status:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

    def do_GET(self) -> None:
        """No list of models."""
        self.send_response(404)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def faulty() -> Iterator[str]:
    with listening(Faulty) as url:
        yield url


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("busy", "http 429", "come back later"),
        ("failing", "stream", "broke"),
        ("garbled", "stream", "no JSON: {{{"),
        ("strange", "stream", "another form"),
        ("cut", "incomplete", "without [DONE]"),
        ("endless", "incomplete", "without a finish reason"),
        ("slow", "timeout", "not done within 0.5 s"),
        ("mute", "connection", "RemoteProtocolError"),
    ],
)
def test_errors_are_counted_by_kind(
    faulty: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, kind: str, message: str
) -> None:
    out = tmp_path / "run.jsonl"
    flags = ["--model", model, "--requests", "2", "--gap", "0", "--timeout", "0.5" if model == "slow" else "30"]
    assert main([faulty, *flags, "--out", str(out)]) == 1
    assert [line["error"] for line in read(out)] == [kind, kind]
    assert all(message in line["message"] and line["e2e"] > 0 for line in read(out))
    printed = " ".join(capsys.readouterr().out.split())
    assert "succeeded 0, failed 2" in printed and f"error: {kind}: 2, such as:" in printed


def test_without_a_server_or_a_list_of_models_it_says_what_to_do(faulty: str) -> None:
    with pytest.raises(SystemExit, match=r"no server at http://127.0.0.1:9/v1 .*start one: uv run main.py serve"):
        main(["http://127.0.0.1:9/v1/"])
    with pytest.raises(SystemExit, match=r"/models answers 404; .*give --model"):
        main([faulty])


@pytest.mark.parametrize("flags", [[], ["--model", "any"]])
def test_a_url_with_a_bad_port_is_named(flags: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"^http://127.0.0.1:notaport/v1 is no URL of a server: [^(]*$"):
        main(["http://127.0.0.1:notaport/v1", *flags])


def test_an_interrupted_run_says_how_many_were_answered(server: str, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    command = [sys.executable, "demos/load_client.py", f"{server}/v1", "--requests", "900", "--concurrency", "1"]
    command += ["--prompt-chars", "40", "--out", str(out)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            while process.poll() is None and not (out.exists() and out.read_text(encoding="utf-8")):
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            printed, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, printed) == (130, "")
    assert said == f"interrupted: {len(read(out))} of 900 requests were answered\n"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--requests", "0"], "--requests is 0; it must be at least 1"),
        (["--gap", "-1"], "--gap is -1.0; it must be at least 0"),
        (["--gap", "nan"], "--gap is nan"),
        (["--timeout", "0"], "--timeout is 0.0; it must be more than 0 seconds"),
        (["--gap", "1", "--concurrency", "2"], "exclude each other"),
        (["--shared-chars", "500"], "--shared-chars is 500; it must be from 0 to --prompt-chars"),
        (["--prompt-chars", "12"], "must leave more than 12 characters"),
    ],
)
def test_impossible_loads_are_refused(capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(flags)
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--model", "any", "--out", str(tmp_path / "none" / "run.jsonl")])
    assert end.value.code == 2 and "run.jsonl cannot be written" in capsys.readouterr().err


def test_the_environment_stands_in_for_flags_and_they_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOAD_TIMEOUT", "2.5")
    monkeypatch.setenv("LOAD_MAX_TOKENS", "7")
    monkeypatch.setenv("LOAD_SEED", "")
    asked = load_client._parser().parse_args(["--max-tokens", "8"])
    assert (asked.timeout, asked.max_tokens, asked.requests, asked.seed) == (2.5, 8, 24, None)
