"""What the log says about requests, and what it never says."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from miniserve.engine import request_log
from miniserve.engine.engine import Engine
from miniserve.engine.request_log import RequestLog
from tests.engine.scripted import EOS, make_engine, make_request, token


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> SimpleNamespace:
    """A clock that the test moves; and the log at level INFO."""
    caplog.set_level(logging.INFO, logger="miniserve")
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(request_log, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def steps(engine: Engine, clock: SimpleNamespace, number: int, seconds: float = 1.0) -> None:
    for _ in range(number):
        engine.step()
        clock.now += seconds


def summaries(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "tokens/s" in message]


def test_one_line_a_finished_request(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine({"a": [token("Hello"), EOS]}, hooks=[RequestLog()])
    for _ in range(2):
        engine.add(make_request("a", "secret!!!"))
        steps(engine, clock, 2)
    engine.add(make_request("b", "hidden"))
    engine.abort("b")
    first, second, aborted = caplog.messages
    assert first.startswith("request a: prompt 9 (0 cached), output 2 tokens, first token ") and first.endswith("stop")
    assert second.startswith("request a: prompt 9 (8 cached)")
    assert aborted.startswith("request b: prompt 6 (0 cached), output 0 tokens, first token none, total ")
    assert aborted.endswith("abort")
    assert "secret" not in caplog.text and "hidden" not in caplog.text and "Hello" not in caplog.text


def test_a_summary_every_ten_seconds(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine({}, max_num_seqs=1, max_model_len=400, num_blocks=101, hooks=[RequestLog()])
    engine.add(make_request("a", "x" * 5, max_tokens=27))
    engine.add(make_request("b", "x" * 5))
    steps(engine, clock, 10)
    assert not summaries(caplog)
    steps(engine, clock, 1)
    [summary] = summaries(caplog)
    assert summary.startswith("prompt 0.5 tokens/s, generation 1.1 tokens/s, running 1, waiting 1, KV cache 4.0%")
    steps(engine, clock, 10)
    assert summaries(caplog)[1].startswith("prompt 0.0 tokens/s, generation 1.0 tokens/s, running 1, waiting 1")


def test_idle_time_is_not_counted(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine({}, max_model_len=400, num_blocks=101, hooks=[RequestLog()])
    for number in range(2):
        engine.add(make_request(f"r{number}", "x" * 5, max_tokens=12))
        steps(engine, clock, 12)
        clock.now += 1000
    assert [summary[:52] for summary in summaries(caplog)] == [
        "prompt 0.5 tokens/s, generation 1.1 tokens/s, runnin"
    ] * 2


def test_short_requests_one_after_the_other_are_summed_up(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: the interval began anew whenever the engine was idle for a moment, and no summary ever came."""
    engine = make_engine({}, hooks=[RequestLog()])
    for number in range(30):
        engine.add(make_request(f"r{number}", max_tokens=1))
        steps(engine, clock, 1)
    assert len(summaries(caplog)) == 2
