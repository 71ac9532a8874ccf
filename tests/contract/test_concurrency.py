"""Many clients at once: no answer in another's place, nothing left behind by those who go away."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.contract.calls import CHAT, COMPLETIONS, WAIT_SECONDS, Server

NUM_CLIENTS = 64


async def ask(client: AsyncOpenAI, model: str, marker: str, *, stream: bool) -> str:
    """The scripted model repeats what it is sent."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": marker}]
    if not stream:
        answer = await client.chat.completions.create(model=model, messages=messages)
        return answer.choices[0].message.content or ""
    parts = []
    async for chunk in await client.chat.completions.create(model=model, messages=messages, stream=True):
        parts.append(chunk.choices[0].delta.content or "")
    return "".join(parts)


def test_answers_are_never_mixed(scripted: Server) -> None:
    async def run() -> None:
        async with scripted.async_openai() as client:

            async def one(number: int) -> None:
                for turn in range(3):
                    marker = f"marker {number}-{turn} " + "x" * (number * 7 % 90)
                    text = await ask(client, "scripted", marker, stream=(number + turn) % 2 == 0)
                    assert text == f"user: {marker}\n"

            await asyncio.gather(*map(one, range(NUM_CLIENTS)))

    asyncio.run(run())
    scripted.wait_until_idle()


def test_a_small_cache_under_load(scripted: Server) -> None:
    """More than fits at once: choices and long answers, in lists, all with their own text."""

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=scripted.url, timeout=WAIT_SECONDS) as client:
            prompts = [[f"prompt {number}-{index} " * 6 for index in range(3)] for number in range(16)]
            calls = (client.post(COMPLETIONS, json={"prompt": own, "n": 2, "max_tokens": 200}) for own in prompts)
            return await asyncio.gather(*calls)

    for number, response in enumerate(asyncio.run(run())):
        texts = [choice["text"] for choice in response.json()["choices"]]
        assert texts == [f"prompt {number}-{index} " * 6 for index in range(3) for _ in range(2)]
    scripted.wait_until_idle()


async def leave(client: httpx.AsyncClient, number: int, dice: random.Random) -> None:
    """Ask for something long, and go away: in a stream, while waiting, at once."""
    prompt = f"<<endless>><<pause 2>> number {number}"
    fields = {"prompt": prompt, "max_tokens": 3500, "n": dice.choice([1, 1, 3])}
    if dice.random() < 0.5:
        async with client.stream("POST", COMPLETIONS, json={**fields, "stream": True}) as response:
            num_lines = dice.randrange(6)
            async for _ in response.aiter_lines():
                num_lines -= 1
                if num_lines < 0:
                    return
    else:
        with pytest.raises(httpx.TimeoutException):
            await client.post(COMPLETIONS, json=fields, timeout=httpx.Timeout(WAIT_SECONDS, read=dice.uniform(0.01, 1)))


@pytest.mark.parametrize("seed", [1, 2])
def test_clients_that_go_away(scripted: Server, seed: int) -> None:
    golden = scripted.chat("canary").text

    async def run() -> None:
        dice = random.Random(seed)
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=scripted.url, timeout=WAIT_SECONDS, limits=limits) as leaving,
            scripted.async_openai() as staying,
        ):
            stayers = (ask(staying, "scripted", f"I stay {number}", stream=number % 2 == 0) for number in range(8))
            leavers = (leave(leaving, number, dice) for number in range(NUM_CLIENTS))
            texts, *_ = await asyncio.gather(asyncio.gather(*stayers), *leavers)
            assert texts == [f"user: I stay {number}\n" for number in range(8)]

    asyncio.run(run())
    scripted.wait_until_idle()
    assert scripted.chat("canary").text == golden == "user: canary\n"
    assert scripted.chat_stream("canary").text == golden


def test_a_plain_request_whose_client_goes_away(scripted: Server) -> None:
    """Bug kind: it was computed to its end for nobody."""
    for path, fields in ((COMPLETIONS, {"prompt": "<<endless>><<pause 20>>", "max_tokens": 4000}), (CHAT, None)):
        body = fields or {"messages": [{"role": "user", "content": "<<endless>><<pause 20>>"}]}
        with pytest.raises(httpx.ReadTimeout):
            scripted.http.post(path, json=body, timeout=0.3)
        # Computing it to its end would take more than a minute: longer than `wait_until_idle` waits.
        scripted.wait_until_idle()


def test_the_next_turn_after_a_stream_was_closed(scripted: Server) -> None:
    """Bug kinds: lost context or a crash; what was computed before the abort is not used again."""
    history = "A long conversation that nobody else has. " * 4
    first = [{"role": "user", "content": history + "<<endless>><<pause 2>>"}]
    with scripted.http.stream("POST", CHAT, json={"messages": first, "stream": True}) as response:
        next(response.iter_text())
    turns = [{"role": "user", "content": history}, {"role": "assistant", "content": "..."}]
    response = scripted.post(CHAT, messages=[*turns, {"role": "user", "content": "And now?"}])
    usage = response.json()["usage"]
    text = f"user: {history}\nassistant: ...\nuser: And now?\n"
    assert response.json()["choices"][0]["message"]["content"] == text
    assert usage["prompt_tokens"] == len(text)
    assert usage["prompt_tokens_details"]["cached_tokens"] >= len(history) // 16 * 16


def test_the_real_model_under_load(real: Server) -> None:
    """Greedy answers are those of each prompt alone, also beside clients that go away."""
    prompts = [f"The number {number} is" for number in ("one", "two", "three", "four")]
    golden = [real.complete(prompt, temperature=0, max_tokens=4).text for prompt in prompts]

    async def run() -> None:
        async with real.async_openai() as client:

            async def one(index: int) -> None:
                answer = await client.completions.create(
                    model="smollm2", prompt=prompts[index % 4], temperature=0, max_tokens=4
                )
                assert answer.choices[0].text == golden[index % 4]

            async def gone(index: int) -> None:
                stream = await client.completions.create(
                    model="smollm2",
                    prompt=f"Go on {index}",
                    max_tokens=500,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                async for _ in stream:
                    break
                await stream.close()

            await asyncio.gather(*map(one, range(8)), *map(gone, range(4)))

    asyncio.run(run())
    real.wait_until_idle()
    assert real.complete(prompts[0], temperature=0, max_tokens=4).text == golden[0]
