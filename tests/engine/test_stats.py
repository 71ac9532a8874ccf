"""The numbers of /stats: what is in them, and the rate over the last ten seconds."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from miniserve.engine import stats as stats_module
from miniserve.engine.stats import EngineStats
from miniserve.outputs import EngineOutput, FinishReason
from tests.engine.scripted import EOS, make_choices, make_parts, make_request, token

KEYS = {
    "model",
    "device",
    "backend",
    "running",
    "waiting",
    "kv_blocks_used",
    "kv_blocks_total",
    "prefix_cache_hit_rate",
    "prompt_tokens_total",
    "generation_tokens_total",
    "tokens_per_second",
    "requests_finished",
    "preemptions",
    "last_step_age_seconds",
    "uptime_seconds",
}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stats_module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def test_an_engine_that_is_not_there_yet() -> None:
    numbers = EngineStats("m").snapshot()
    assert numbers.keys() == KEYS
    assert (numbers["model"], numbers["device"], numbers["backend"]) == ("m", None, None)
    json.dumps(numbers, allow_nan=False)


def test_an_engine_at_work() -> None:
    stats = EngineStats("m")
    parts = make_parts({"a": [token("S"), EOS]}, hooks=[stats], num_blocks=11, max_num_seqs=1)
    stats.bind(parts, lambda: 1.5)
    engine = parts.engine
    for _ in range(2):
        engine.add(make_request("a", "x" * 9))
        while engine.has_work:
            engine.step()
    engine.add(make_request("b", "y" * 5))
    engine.add(make_request("c"))
    engine.step()
    numbers = stats.snapshot()
    assert numbers.keys() == KEYS
    json.dumps(numbers, allow_nan=False)
    assert (numbers["device"], numbers["backend"], numbers["last_step_age_seconds"]) == ("cpu", "script", 1.5)
    assert (numbers["running"], numbers["waiting"]) == (1, 1)
    assert (numbers["kv_blocks_used"], numbers["kv_blocks_total"]) == (2, 10)
    assert numbers["prefix_cache_hit_rate"] == pytest.approx(8 / 23)
    assert (numbers["prompt_tokens_total"], numbers["generation_tokens_total"]) == (9 + 9 + 5, 2 + 2 + 1)
    assert numbers["requests_finished"] == {"stop": 2, "length": 0, "abort": 0, "error": 0}


def test_tokens_per_second_are_those_of_the_last_ten_seconds(clock: Clock) -> None:
    stats = EngineStats("m")
    engine = make_parts(hooks=[stats]).engine
    rates = []
    engine.add(make_request("a", max_tokens=20))
    for _ in range(20):
        engine.step()
        clock.now += 1.0
        rates.append(stats.snapshot()["tokens_per_second"])
    assert rates == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0] + [1.0] * 10
    clock.now += 9.5
    assert stats.snapshot()["tokens_per_second"] == 0
    assert stats.snapshot()["generation_tokens_total"] == 20


def test_a_prompt_is_counted_once() -> None:
    """Not for each choice, not when it was aborted before its first token, and also when only it was wanted."""
    stats = EngineStats("m")
    engine = make_parts(hooks=[stats]).engine
    first, *forks = make_choices("a", 3, "x" * 9, max_tokens=2)
    engine.add(first, forks)
    engine.add(make_request("score", "y" * 5, max_tokens=0))
    outputs: list[EngineOutput] = []
    while engine.has_work:
        outputs += engine.step()
    engine.add(make_request("gone", "z" * 3))
    engine.abort("gone")
    assert len([output for output in outputs if output.finish_reason is FinishReason.LENGTH]) == 4
    assert stats.snapshot()["prompt_tokens_total"] == 9 + 5
