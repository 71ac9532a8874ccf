"""The soak: its traffic tells right from wrong, and its report says what is not flat."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from scripts.soak import clients_at
from scripts.soak_report import MB, Sample, Soak, checks, report, write
from scripts.soak_traffic import (
    ABORTED,
    FAILED,
    RIGHT,
    WRONG,
    Outcome,
    Traffic,
    golden_answers,
    questions,
    refusals,
    streamed_content,
)
from tests.contract.conftest import SCRIPTED
from tests.contract.process import ServerProcess

PHASES = [(40.0, 16), (20.0, 64)]
START = Sample(0.0, 0, 16, 1000 * MB, 20, 9, 3, 0, 10, 0)


# The traffic


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ServerProcess("--max-model-len", "4096", command=SCRIPTED) as server:
        yield server.url


def test_every_kind_is_asked_and_right(url: str) -> None:
    traffic = asyncio.run(_traffic(url, {}))
    kinds = {each.kind for each in traffic.outcomes}
    assert kinds == {question.kind for question in questions()} | {refusal.kind for refusal in traffic.refusals}
    assert {each.verdict for each in traffic.outcomes} == {RIGHT, ABORTED}, _bad(traffic)
    assert all(each.seconds > 0 and each.clients == 12 for each in traffic.outcomes)


def test_another_answer_is_wrong(url: str) -> None:
    traffic = asyncio.run(_traffic(url, {"chat": [("another", "stop")]}))
    found = {each.verdict for each in traffic.outcomes if each.kind == "chat"}
    assert WRONG in found and found <= {WRONG, ABORTED}
    assert {each.verdict for each in traffic.outcomes if each.kind != "chat"} == {RIGHT, ABORTED}, _bad(traffic)


def test_a_server_that_is_gone_fails_all() -> None:
    async def ask() -> Traffic:
        async with httpx.AsyncClient(base_url="http://127.0.0.1:9", trust_env=False) as http:
            traffic = Traffic(http, questions()[:1], [[("a", "stop")]], refusals(100), seed=0)
            await traffic.run(lambda now: 2 if now < 0.3 else 0)
            return traffic

    assert {each.verdict for each in asyncio.run(ask()).outcomes} == {FAILED}


async def _traffic(url: str, wrong: dict[str, list[tuple[str, str | None]]]) -> Traffic:
    """Two seconds of it; `wrong`: golden answers by kind, in place of the right ones."""
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        asked = questions()
        golden = await golden_answers(http, asked)
        golden = [wrong.get(question.kind, right) for question, right in zip(asked, golden, strict=True)]
        traffic = Traffic(http, asked, golden, refusals(4096), seed=1)
        await traffic.run(lambda now: 12 if now < 1 or len(traffic.outcomes) < 300 else 0)
        return traffic


def _bad(traffic: Traffic) -> list[Outcome]:
    return [each for each in traffic.outcomes if each.verdict in (WRONG, FAILED)][:3]


def test_the_pieces_of_a_stream_are_joined() -> None:
    events = [
        {"choices": [{"index": 1, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]},
        {"choices": [{"index": 1, "delta": {"content": "x"}, "finish_reason": "stop"}]},
        {"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": "length"}]},
    ]
    assert streamed_content(events) == [("ab", "length"), ("x", "stop")]


def test_the_number_of_clients_over_time() -> None:
    assert [clients_at(PHASES, now) for now in (0, 39, 41, 59, 61, 121, 179, 181)] == [16, 16, 64, 64, 16, 16, 64, 0]


# The report


def soak(samples: Sequence[Sample] = (), outcomes: Sequence[Outcome] = (), idle: Sample = START) -> Soak:
    """Three cycles of a minute in which nothing changes, and in addition what is given."""
    flat = [replace(START, seconds=20.0 * index, cycle=index // 3) for index in range(9)]
    steady = [
        Outcome("chat", 60.0 * cycle + at, clients, 0.1, seconds, RIGHT)
        for cycle in range(3)
        for at, clients, seconds in ((5, 16, 1.0), (50, 64, 3.0))
    ]
    empty = replace(idle, running=idle.running - 3, kv_blocks_used=idle.kv_blocks_used - 10)
    return Soak(
        "soak", "a machine", PHASES, 3, [*steady, *outcomes], [*flat, *samples], empty, exit_code=0, has_traceback=False
    )


def broken(run: Soak) -> list[str]:
    return [check.what for check in checks(run) if not check.holds]


def test_what_is_flat_holds() -> None:
    assert broken(soak()) == []
    assert "**Everything holds.**" in report(soak())


@pytest.mark.parametrize(
    ("run", "what"),
    [
        (soak([replace(START, cycle=2, rss=1051 * MB)]), "memory"),
        (soak([replace(START, cycle=2, fds=29)]), "files"),
        (soak([replace(START, cycle=2, threads=12)]), "threads"),
        (soak(outcomes=[Outcome("chat", 170.0, 64, 0.1, 6.1, RIGHT)]), "64 clients"),
        (soak(outcomes=[Outcome("chat", 1.0, 16, 0.1, 1.0, WRONG, "x in place of y")]), "golden"),
        (soak(outcomes=[Outcome("chat", 1.0, 16, None, 1.0, FAILED, "ReadError")]), "golden"),
        (soak(idle=replace(START, kv_blocks_used=11)), "blocks are free"),
        (replace(soak(), exit_code=1), "SIGTERM"),
        (replace(soak(), has_traceback=True), "traceback"),
    ],
)
def test_what_does_not_hold_is_said(run: Soak, what: str) -> None:
    [found] = broken(run)
    assert what in found
    assert "**NOT everything holds.**" in report(run)


def test_what_went_wrong_is_in_the_report() -> None:
    text = report(soak(outcomes=[Outcome("chat", 1.0, 16, 0.1, 1.0, WRONG, "x in place of y")]))
    assert "- chat: wrong: x in place of y" in text
    assert "| chat | 7 | 6 | 0 | 1 | 0 |" in text


def test_the_files(tmp_path: Path) -> None:
    write(soak(), tmp_path / "soak")
    assert {file.name for file in (tmp_path / "soak").iterdir()} == {"report.md", "soak.png", "samples.jsonl"}
    assert len((tmp_path / "soak" / "samples.jsonl").read_text().splitlines()) == 9
