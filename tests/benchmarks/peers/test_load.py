"""The load: the prompts, what is asked, and what is read from a stream; against a small server of the test's own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from miniserve.benchmarks.peers.arms import Interface
from miniserve.benchmarks.peers.load import (
    WARM_UP_TOKENS,
    Answer,
    Server,
    Timing,
    Words,
    Workload,
    figures,
    measure,
    read_answer,
    select_workloads,
)
from miniserve.errors import ConfigError, InternalError

VOCABULARY = {"Ġharbour": 7, "Ġlight": 8, "Ġsea": 9, "Ġof": 10, "light": 11, "ĠSea": 12, "Ġ12345": 13}
LOAD = Workload(name="load", streams=2, turns=2, prompt_tokens=5, output_tokens=3)


@pytest.fixture
def words(tmp_path: Path) -> Words:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": VOCABULARY}}), encoding="utf-8")
    return Words(tmp_path)


def event(text: str | None, usage: dict[str, int] | None = None, finish: str | None = None) -> str:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": finish}]
    return f"data: {json.dumps({'choices': choices, 'usage': usage})}"


def usage(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output}


# The prompts


def test_ids_and_text_are_the_same_prompt(words: Words) -> None:
    token_ids, text = words.prompt(50, "seed")
    assert len(token_ids) == 50
    assert [VOCABULARY[f"Ġ{word}"] for word in text.removeprefix(" ").split(" ")] == token_ids


def test_only_plain_words_are_used(words: Words) -> None:
    """Short pieces, capitals and digits may be tokenised otherwise in the middle of a text."""
    assert set(words.prompt(200, "seed")[0]) == {7, 8, 9}


def test_a_seed_gives_one_prompt(words: Words) -> None:
    assert words.prompt(20, "a") == words.prompt(20, "a") != words.prompt(20, "b")


def test_a_tokenizer_without_such_words(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"▁sea": 1}}}), encoding="utf-8")
    with pytest.raises(ConfigError, match="no words"):
        Words(tmp_path)


# What is asked


def test_a_server_that_takes_ids() -> None:
    body = Server("http://x", "model", Interface.TOKEN_IDS).body([1, 2], " a b", 64)
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ([1, 2], 64, True, 0)


def test_a_server_that_takes_text_only() -> None:
    body = Server("http://x", "model", Interface.TEXT).body([1, 2], " a b", 64)
    assert body["prompt"] == " a b"
    assert json.loads(body["generation_config"])["min_new_tokens"] == 64
    assert "ignore_eos" not in body


# What is read


def test_a_stream() -> None:
    lines = (event("a"), "", event("b"), ": a comment", event(None, usage(5, 2)), "data: [DONE]")
    timing = read_answer(Answer((0.5, 0.5, 0.75, 0.8, 1.0, 1.0), lines))
    assert timing == Timing((0.5, 0.75), 5, 2)


def test_events_without_a_token() -> None:
    """A token may be half a character, and have no text yet; an end without text is no token."""
    lines = (event("a"), event(""), event("b", finish="length"), event("", usage(5, 3), finish="length"))
    assert read_answer(Answer((1.0, 2.0, 3.0, 4.0), lines)).events == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((event("a"), "data: [DONE]"), "usage"),
        ((event(None, usage(5, 2)),), "text"),
        (("data: {broken",), "JSON"),
        (("data: [1]",), "JSON"),
        ((event("a"), 'data: {"error": {"message": "out of memory"}}'), "out of memory"),
    ],
)
def test_a_stream_that_went_wrong(lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(InternalError, match=message):
        read_answer(Answer((0.0,) * len(lines), lines))


def test_figures() -> None:
    timings = [Timing((1.0, 1.5, 2.5), 5, 3), Timing((2.0, 2.5, 3.0), 5, 3)]
    result = figures(LOAD, 3.0, timings)
    assert result.output_tokens_per_second == 2.0
    assert (result.ttft, result.itl, result.tpot) == (1.5, 0.5, 0.625)


def test_merged_tokens_do_not_make_a_token_faster() -> None:
    """Two events carry three tokens: the time per token is over the tokens, not over the events."""
    assert figures(LOAD, 1.0, [Timing((1.0, 2.0), 5, 3)]).tpot == 0.5


@pytest.mark.parametrize("timing", [Timing((1.0,), 6, 3), Timing((1.0,), 5, 2)])
def test_other_tokens_than_asked_for(timing: Timing) -> None:
    with pytest.raises(InternalError, match="asked for 5 tokens in and 3 out"):
        figures(LOAD, 1.0, [timing])


def test_workloads_by_name() -> None:
    assert [workload.streams for workload in select_workloads(["16 streams"])] == [16]
    with pytest.raises(ConfigError, match="17 streams"):
        select_workloads(["17 streams"])


# A run


class Handler(BaseHTTPRequestHandler):
    """Answers with as many events as were asked for; a model named "broken" is not there."""

    bodies: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        self.send_response(404 if body["model"] == "broken" else 200)
        self.end_headers()
        number = body["max_tokens"]
        lines = [*(event("x") for _ in range(number)), event(None, usage(len(body["prompt"]), number)), "data: [DONE]"]
        self.wfile.write("".join(f"{line}\n\n" for line in lines).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def asked() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def url(asked: list[dict[str, Any]]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"bodies": asked})) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_run_warms_up_and_asks_for_every_prompt_once(url: str, asked: list[dict[str, Any]], words: Words) -> None:
    result = measure(Server(url, "model", Interface.TOKEN_IDS), LOAD, words, "seed")
    assert result.output_tokens_per_second == pytest.approx(12 / result.seconds)
    assert [body["max_tokens"] for body in asked] == [WARM_UP_TOKENS] * 2 + [3] * 4
    assert len({tuple(body["prompt"]) for body in asked}) == len(asked)


def test_a_server_that_refuses(url: str, words: Words) -> None:
    with pytest.raises(InternalError, match="HTTP 404"):
        measure(Server(url, "broken", Interface.TOKEN_IDS), LOAD, words, "seed")


def test_nobody_listens(words: Words) -> None:
    with pytest.raises(InternalError, match="ClientConnectorError"):
        measure(Server("http://127.0.0.1:9", "model", Interface.TOKEN_IDS), LOAD, words, "seed")
