"""The order of the comparison, and that no failure ends it. The servers are small programs of the test's own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from miniserve.benchmarks.peers import llama_bench, probes
from miniserve.benchmarks.peers.arms import MINISERVE, VLLM, Arm, Interface
from miniserve.benchmarks.peers.load import Workload
from miniserve.benchmarks.peers.places import CHECKPOINT, Places
from miniserve.benchmarks.peers.probes import Speed
from miniserve.benchmarks.peers.results import Comparison
from miniserve.benchmarks.peers.rounds import compare, plan_comparison
from miniserve.benchmarks.peers.server import free_port, running
from miniserve.benchmarks.peers.setup import State
from miniserve.errors import ConfigError, InternalError

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()
        number = asked["max_tokens"]
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": number}
        events = [{"choices": [{"text": "x"}]}] * number + [{"choices": [], "usage": usage}]
        self.wfile.write("".join(f"data: {json.dumps(event)}\\n\\n" for event in events).encode())

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
LOADS = (
    Workload(name="one", streams=1, turns=2, prompt_tokens=4, output_tokens=3),
    Workload(name="two", streams=2, turns=1, prompt_tokens=6, output_tokens=3),
)


def arm(name: str, *command: str, interface: Interface = Interface.TOKEN_IDS, form: str = CHECKPOINT) -> Arm:
    return Arm(name=name, peer=MINISERVE, form=form, command=command, interface=interface)


GOOD = arm("good", "{python}", "{model}/server.py", "{port}")
ALSO_GOOD = replace(GOOD, name="also good")
BROKEN = arm("broken", "{python}", "-c", "print('no such model'); raise SystemExit(4)")
MISSING = arm("missing", "no-such-program")


@pytest.fixture
def places(tmp_path: Path) -> Places:
    made = Places(tmp_path)
    for model in ("small", "large"):
        folder = made.model(model, CHECKPOINT)
        folder.mkdir(parents=True)
        (folder / "server.py").write_text(SERVER, encoding="utf-8")
        vocabulary = {"model": {"vocab": {"Ġharbour": 1, "Ġlight": 2}}}
        (folder / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    return made


@pytest.fixture(autouse=True)
def _known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "probe", lambda threads: Speed(10.0 * threads, 1.0))


def run(arms: list[Arm], places: Places, models: tuple[str, ...] = ("small",), number: int = 1) -> list[Comparison]:
    state = State(dict.fromkeys(models, "1"), {})
    written: list[Comparison] = []
    compare(plan_comparison(arms, models, LOADS, number, state), arms, places, written.append, lambda _: None)
    return written


def test_every_arm_has_its_turn_before_the_next_round(places: Places) -> None:
    *_, last = run([GOOD, ALSO_GOOD], places, ("small", "large"), 2)
    order = [(turn.model, turn.round, turn.arm) for turn in last.turns]
    assert order == [(m, n, a) for m in ("small", "large") for n in (1, 2) for a in ("good", "also good")]
    assert all(set(turn.figures) == {"one", "two"} and not turn.errors for turn in last.turns)
    assert last.turns[0].speed.teraflops == 1.0
    assert last.turns[0].start_seconds is not None


def test_results_are_written_after_every_turn(places: Places) -> None:
    assert [len(comparison.turns) for comparison in run([GOOD, BROKEN], places, number=2)] == [1, 2, 3, 4]


def test_a_server_that_does_not_start_does_not_end_the_comparison(places: Places) -> None:
    *_, last = run([BROKEN, MISSING, GOOD], places)
    broken, missing, good = last.turns
    assert "no such model" in broken.errors[""]
    assert "no-such-program" in missing.errors[""]
    assert set(good.figures) == {"one", "two"}


def test_llama_bench_takes_part_with_one_stream(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fake(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, BENCH_OUTPUT, "")

    monkeypatch.setattr(subprocess, "run", fake)
    *_, last = run([arm("bench", "bench", interface=Interface.LLAMA_BENCH)], places)
    assert set(last.turns[0].figures) == {"one"}
    assert asked[0][1:] == ["-p", "4", "-n", "3", "-pg", "4,3", "-r", "2"]


# The plan


def test_arms_whose_peer_or_files_are_missing_are_left_out() -> None:
    arms = [GOOD, replace(GOOD, name="vllm", peer=VLLM), replace(GOOD, name="gguf", form="bf16")]
    plan = plan_comparison(arms, ["small"], LOADS, 1, State({"small": "1"}, {VLLM: "no wheel for this machine"}))
    assert plan.left_out["small"]["vllm"] == "no wheel for this machine"
    assert "small-bf16 is not set up" in plan.left_out["small"]["gguf"]
    assert "good" not in plan.left_out["small"]


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="run the command setup"):
        plan_comparison([GOOD], ["small"], LOADS, 1, State({}, {}))


def test_no_rounds() -> None:
    with pytest.raises(ConfigError, match="--rounds must be at least 1, got 0"):
        plan_comparison([GOOD], ["small"], LOADS, 0, State({"small": "1"}, {}))


# llama-bench

BENCH_OUTPUT = json.dumps(
    [
        {"n_prompt": 4, "n_gen": 0, "avg_ns": 2e9},
        {"n_prompt": 0, "n_gen": 3, "avg_ns": 6e9},
        {"n_prompt": 4, "n_gen": 3, "avg_ns": 7.5e9},
    ]
)


def test_llama_benchs_output() -> None:
    figures = llama_bench.read_output(BENCH_OUTPUT, LOADS[0])
    assert (figures.output_tokens_per_second, figures.ttft, figures.tpot) == (0.4, 2.0, 2.0)


@pytest.mark.parametrize("text", ["error: no model", "[]", '[{"n_prompt": 4}]', "{}"])
def test_llama_benchs_output_in_another_form(text: str) -> None:
    with pytest.raises(InternalError, match="another form"):
        llama_bench.read_output(text, LOADS[0])


# The life of a server


def test_a_server_ends_with_all_that_it_started(places: Places, tmp_path: Path) -> None:
    """A worker that ignores the end of its parent must not compute beside the next arm."""
    port = free_port("127.0.0.1")
    program = tmp_path / "parent.py"
    start = f"subprocess.Popen([sys.executable, {str(places.model('small', CHECKPOINT) / 'server.py')!r}, '{port}'])"
    program.write_text(f"import subprocess, sys, time\n{start}\ntime.sleep(60)\n", encoding="utf-8")
    url = f"http://127.0.0.1:{port}/health"
    with running([sys.executable, str(program)], {}, url, tmp_path / "log") as seconds:
        assert 0 < seconds < 60
        assert httpx.get(url).status_code == 200
    for _ in range(50):  # a killed process may take a moment to let go of its port
        try:
            httpx.get(url)
        except httpx.HTTPError:
            return
        time.sleep(0.1)
    pytest.fail("the child of the server still answers")


def test_the_machines_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("READ_BYTES", 2**20), ("SIZE", 64), ("SECONDS", 0.01)):
        monkeypatch.setattr(probes, name, value)
    speed = probes.measure(torch.get_num_threads())
    assert speed.gigabytes_per_second > 0.01
    assert speed.teraflops > 1e-6
