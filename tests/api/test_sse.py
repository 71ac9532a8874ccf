from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest

from miniserve.api import generation
from miniserve.core.schedule import RunnerOutput, RunnerResult, ScheduledRequest
from tests.api.driver import CHAT, COMPLETIONS, HELLO, Api, Exchange
from tests.engine.scripted import EOS, TOKENIZER, tokens

LONG = {"max_tokens": 200, "ignore_eos": True}


def echo_of_prompt(item: ScheduledRequest) -> list[int]:
    """Answers with the prompt itself, again and again."""
    prompt = list(item.token_ids[: item.num_prompt_tokens])
    return prompt * 40


async def send(api: Api, path: str, body: dict[str, Any]) -> Exchange:
    return api.exchange("POST", path, body).start()


def test_headers_of_a_stream(api: Api) -> None:
    answer = api.chat(stream=True)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache" and "content-length" not in answer.headers


@pytest.mark.parametrize(("path", "needed"), [(CHAT, HELLO), (COMPLETIONS, {"prompt": "a"})])
def test_a_fault_before_the_first_token_is_a_plain_error(path: str, needed: dict[str, Any]) -> None:
    with Api() as api:
        api.engine.parts.engine.runner = _Fails(after=0)
        answer = api.post(path, needed | {"stream": True})
        assert answer.brief() == (500, "server_error", "internal_error")
        assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(("path", "needed"), [(CHAT, HELLO), (COMPLETIONS, {"prompt": "a"})])
def test_a_fault_after_the_first_token_is_an_event_before_done(path: str, needed: dict[str, Any]) -> None:
    with Api() as api:
        api.engine.parts.engine.runner = _Fails(after=3, gate=(gate := threading.Event()))

        async def scenario() -> Any:
            exchange = await send(api, path, needed | {"stream": True})
            await exchange.until(lambda exchange: len(exchange.body) > 0)
            gate.set()
            return await exchange.finish()

        answer = api.run(scenario())
        assert answer.status == 200
        *chunks, last = answer.events()
        assert chunks and all("choices" in chunk for chunk in chunks)
        assert list(last) == ["error"] and last["error"]["code"] == "internal_error"
        assert answer.headers["x-request-id"] in last["error"]["message"]


class _Fails:
    """Samples "." `after` times, then raises for ever."""

    def __init__(self, after: int, gate: threading.Event | None = None) -> None:
        self._left = after
        self._gate = gate

    def execute(self, step: Any) -> Any:
        if self._left <= 0 and self._gate is not None:
            assert self._gate.wait(20)
        if self._left <= 0:
            raise ValueError("secret")
        self._left -= 1

    def sample(self, step: Any, logits: Any, masks: Any = None) -> Any:
        token_ids = tuple(tokens("."))
        return RunnerOutput(tuple(RunnerResult(token_ids if item.samples else ()) for item in step.scheduled))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_stream_shows_life_while_the_prefill_takes_long(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "FIRST_OUTPUT_SECONDS", 0.01)
    with Api(lambda _: [*tokens("Hi"), EOS]) as api:
        api.model.gate.clear()

        async def scenario() -> Any:
            exchange = await send(api, path, (HELLO if path == CHAT else {"prompt": "a"}) | {"stream": True})
            await exchange.until(lambda exchange: exchange.started)
            body = exchange.body
            api.model.gate.set()
            return body, await exchange.finish()

        early, answer = api.run(scenario())
        assert early.count(b'"role"') == (1 if path == CHAT else 0) and b"Hi" not in early
        assert answer.body.startswith(early) and answer.body.count(b'"role"') == (1 if path == CHAT else 0)
        answer.events()


def test_a_fault_after_the_headers_but_before_a_token_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "FIRST_OUTPUT_SECONDS", 0.01)
    with Api() as api:
        api.model.gate.clear()

        async def scenario() -> Any:
            exchange = await send(api, COMPLETIONS, {"prompt": "a", "stream": True})
            await exchange.until(lambda exchange: exchange.started)
            drain = asyncio.create_task(api.engine.drain(0.0))
            answer = await exchange.finish()
            api.model.gate.set()
            await drain
            return answer

        [only] = api.run(scenario()).events()
        assert only["error"]["code"] == "engine_unavailable"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_ends_its_request_within_a_step(stream: bool, n: int) -> None:
    """A plain request went on to its end after its client had gone."""
    with Api(echo_of_prompt) as api:
        api.model.gate.clear()

        async def scenario() -> int:
            exchange = await send(api, COMPLETIONS, {"prompt": "abc", "stream": stream, "n": n} | LONG)
            await asyncio.to_thread(api.model.entered.wait, 20)
            exchange.disconnect()
            assert exchange.task is not None
            await asyncio.wait_for(exchange.task, 20)
            api.model.gate.set()
            await api.idle()
            return len(api.model.steps)

        # The step that was being computed, and nothing after it.
        assert api.run(scenario()) == 1
        assert api.metric('miniserve_requests_finished_total{model_name="scripted",reason="abort"}') == n
        assert api.complete("xyz", max_tokens=3).json()["choices"][0]["text"] == "xyz"


def test_a_client_that_goes_away_in_the_middle_of_a_stream(api: Api) -> None:
    permits = api.model.permits = threading.Semaphore(5)  # the engine stops in the middle of the stream

    async def scenario() -> None:
        exchange = await send(api, CHAT, HELLO | {"stream": True, "max_tokens": 200, "ignore_eos": True})
        await exchange.until(lambda exchange: exchange.body.count(b"data:") > 1)
        exchange.disconnect()
        assert exchange.task is not None
        await asyncio.wait_for(exchange.task, 20)
        assert b"[DONE]" not in exchange.body and b'"error"' not in exchange.body
        permits.release()
        await api.idle()

    api.run(scenario())


def test_a_client_that_goes_away_while_it_does_not_read(api: Api) -> None:
    async def scenario() -> None:
        exchange = api.exchange("POST", CHAT, HELLO | {"stream": True})
        exchange.held = asyncio.Event()
        exchange.start()
        await api.engine.wait_ready()
        exchange.disconnect()
        assert exchange.task is not None
        await asyncio.wait_for(exchange.task, 20)
        await api.idle()

    api.run(scenario())


def test_a_client_that_goes_away_before_its_body_is_there(api: Api) -> None:
    async def scenario() -> Exchange:
        exchange = api.exchange("POST", COMPLETIONS, parts=[])
        exchange.start()
        exchange.disconnect()
        await exchange.finish()
        return exchange

    assert api.run(scenario()).answer().status == 499


def test_a_slow_reader_gets_everything_in_fewer_chunks() -> None:
    with Api(echo_of_prompt) as api:

        async def scenario() -> Any:
            exchange = api.exchange("POST", COMPLETIONS, {"prompt": "abcd", "stream": True} | LONG)
            exchange.held = asyncio.Event()
            exchange.start()
            for _ in range(2000):
                if api.engine.stats.snapshot()["requests_finished"]["length"]:
                    break
                await asyncio.sleep(0.005)
            exchange.held.set()
            return await exchange.finish()

        events = api.run(scenario()).events()
        assert "".join(event["choices"][0]["text"] for event in events) == ("abcd" * 40 + "." * 40)
        assert len(events) < 20


def test_many_clients_at_once_get_their_own_answers_and_only_those() -> None:
    """Answers of concurrent requests were mixed; blocks of clients that had gone stayed in use."""
    dice = random.Random(0)
    with Api(echo_of_prompt, max_num_seqs=16) as api:

        async def client(number: int) -> None:
            marker = f"<{number:03}>"
            stream, leaves = dice.random() < 0.5, dice.random() < 0.3
            exchange = await send(api, COMPLETIONS, {"prompt": marker, "stream": stream, "max_tokens": 50})
            if leaves:
                await asyncio.sleep(dice.random() * 0.05)
                exchange.disconnect()
                assert exchange.task is not None
                await asyncio.wait_for(exchange.task, 30)
                return
            answer = await exchange.finish()
            texts = (
                [event["choices"][0]["text"] for event in answer.events()]
                if stream
                else [answer.json()["choices"][0]["text"]]
            )
            assert "".join(texts) == (marker * 40)[:50]

        async def scenario() -> None:
            await asyncio.gather(*(client(number) for number in range(64)))
            await api.idle()

        api.run(scenario())
        assert TOKENIZER.decode(tokens("canary")) == "canary"
        assert api.complete("canary", max_tokens=6).json()["choices"][0]["text"] == "canary"
