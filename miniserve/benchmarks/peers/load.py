"""The load: prompts of an exact length that no server has seen, streamed over HTTP, and the client's clock.

Every arm gets the same prompts in the same round. They are random words of the model's vocabulary that are one token
each, so their ids and their text are the same prompt, for the servers that take only one of the two. The client does
no more than note when lines come in, and reads them afterwards: it runs on the cores that it measures. For the same
reason it is aiohttp's, which takes a third of the time of httpx for a line.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from miniserve.benchmarks.peers.arms import Interface
from miniserve.errors import ConfigError, InternalError

WARM_UP_TOKENS = 8
REQUEST_SECONDS = 600.0
MAX_ERROR_CHARS = 200
_SPACE = "Ġ"  # byte-level BPE's letter for a space


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One shape of load.

    Attributes:
        streams: requests at any time.
        turns: requests that each stream sends, one after the other.
    """

    name: str
    streams: int
    turns: int
    prompt_tokens: int
    output_tokens: int = 64

    @property
    def context(self) -> int:
        """Tokens of a request, prompt and output."""
        return self.prompt_tokens + self.output_tokens


WORKLOADS = (
    Workload(name="1 stream", streams=1, turns=3, prompt_tokens=128),
    Workload(name="16 streams", streams=16, turns=1, prompt_tokens=128),
    Workload(name="16 streams, long prompts", streams=16, turns=1, prompt_tokens=1000),
)


def select_workloads(names: Sequence[str]) -> tuple[Workload, ...]:
    """The workloads of these names; all of them for no name.

    Raises:
        ConfigError: there is no workload of a name.
    """
    known = [workload.name for workload in WORKLOADS]
    for name in names:
        if name not in known:
            raise ConfigError(f"--workloads {name}: there is no such workload; there are: {'; '.join(known)}")
    return tuple(workload for workload in WORKLOADS if not names or workload.name in names)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run of a workload gave. Seconds; None where an arm cannot tell.

    Attributes:
        seconds: from the first request to the last end.
        output_tokens_per_second: of all streams together, over those seconds.
        ttft: until a request's first event; the median.
        itl: between two events of a stream, each of which has one token or more; the median.
        tpot: a request's time per output token after its first one; the median.
    """

    seconds: float
    output_tokens_per_second: float
    ttft: float | None
    itl: float | None
    tpot: float | None


# The prompts


class Words:
    """Words that are one token each, in any text of such words.

    Raises:
        ConfigError: the tokenizer has no such words; it is not of the byte-level BPE kind.
    """

    def __init__(self, checkpoint: Path) -> None:
        vocabulary = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        words = [
            (token.removeprefix(_SPACE), token_id) for token, token_id in vocabulary.items() if token[:1] == _SPACE
        ]
        self._words = [(word, token_id) for word, token_id in words if _is_plain(word)]
        if not self._words:
            raise ConfigError(f"{checkpoint}: its tokenizer has no words with a space in front")

    def prompt(self, num_tokens: int, seed: str) -> tuple[list[int], str]:
        """Token ids, and the same as text."""
        chosen = random.Random(seed).choices(self._words, k=num_tokens)
        return [token_id for _, token_id in chosen], "".join(f" {word}" for word, _ in chosen)


def _is_plain(word: str) -> bool:
    return len(word) > 2 and word.isascii() and word.isalpha() and word.islower()


# One request


@dataclass(frozen=True, slots=True)
class Server:
    """Where to ask, and how."""

    url: str
    model: str
    interface: Interface

    def body(self, token_ids: list[int], text: str, output_tokens: int) -> dict[str, Any]:
        """The JSON of a request for exactly `output_tokens` tokens, the likeliest ones."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": output_tokens, "temperature": 0, "stream": True}
        if self.interface is Interface.TEXT:
            greedy = {"max_new_tokens": output_tokens, "min_new_tokens": output_tokens, "do_sample": False}
            return body | {"prompt": text, "generation_config": json.dumps(greedy)}
        return body | {"prompt": token_ids, "ignore_eos": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class Answer:
    """The stream of one request: when each line came, in seconds from its sending, and the lines."""

    times: tuple[float, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """What an answer tells: when each event with a token or more came, and the tokens that the server counted."""

    events: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int


async def _ask(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    start = time.perf_counter()
    times, lines = [], []
    async with client.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            said = await response.text(errors="replace")
            raise InternalError(f"HTTP {response.status}: {said[:MAX_ERROR_CHARS]}")
        async for line in response.content:
            times.append(time.perf_counter() - start)
            lines.append(line)
    return Answer(tuple(times), tuple(line.decode(errors="replace").rstrip("\r\n") for line in lines))


def read_answer(answer: Answer) -> Timing:
    """Events and counts of a stream.

    Raises:
        InternalError: it is not what OpenAI's servers send, or it is an error.
    """
    events, usage = [], None
    for when, line in zip(answer.times, answer.lines, strict=True):
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        try:
            event = json.loads(data)
            if any(choice.get("text") or not choice.get("finish_reason") for choice in event.get("choices") or ()):
                events.append(when)
            usage = event.get("usage") or usage
        except (ValueError, AttributeError) as error:
            raise InternalError(f"an event is no JSON object: {data[:MAX_ERROR_CHARS]}") from error
        if "error" in event:
            raise InternalError(f"the stream ended in an error: {data[:MAX_ERROR_CHARS]}")
    if not events or usage is None:
        raise InternalError("the stream ended without any text, or without a usage")
    return Timing(tuple(events), usage["prompt_tokens"], usage["completion_tokens"])


# A run


def measure(server: Server, workload: Workload, words: Words, seed: str) -> Figures:
    """Warm up with the same shape and other prompts, then run the workload once.

    Raises:
        InternalError: the server failed, or did something else than it was asked.
    """
    try:
        warm_up = replace(workload, turns=1, output_tokens=WARM_UP_TOKENS)
        asyncio.run(_run(server, warm_up, words, f"{seed}/warm-up"))
        seconds, answers = asyncio.run(_run(server, workload, words, seed))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # ValueError: an endless line
        raise InternalError(f"{type(error).__name__}: {error}") from error
    return figures(workload, seconds, [read_answer(answer) for answer in answers])


async def _run(server: Server, workload: Workload, words: Words, seed: str) -> tuple[float, list[Answer]]:
    """The seconds of the run, and every answer."""
    answers: list[Answer] = []
    bodies = [
        server.body(*words.prompt(workload.prompt_tokens, f"{seed}/{index}"), workload.output_tokens)
        for index in range(workload.streams * workload.turns)
    ]
    waiting = iter(bodies)
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    # No bound on connections, and a new one for each request: llama-server ends those that wait for the next.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:

        async def stream() -> None:
            for body in waiting:
                answers.append(await _ask(client, server.url, body))

        start = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(workload.streams)))
        return time.perf_counter() - start, answers


def figures(workload: Workload, seconds: float, timings: Sequence[Timing]) -> Figures:
    """Rates and medians of a run.

    Raises:
        InternalError: a request had other tokens than it should have.
    """
    for timing in timings:
        asked, got = (workload.prompt_tokens, workload.output_tokens), (timing.prompt_tokens, timing.output_tokens)
        if asked != got:
            raise InternalError(f"asked for {asked[0]} tokens in and {asked[1]} out, the server counted {got}")
    gaps = [
        after - before for timing in timings for before, after in zip(timing.events, timing.events[1:], strict=False)
    ]
    rests = [(timing.events[-1] - timing.events[0]) / (timing.output_tokens - 1) for timing in timings]
    return Figures(
        seconds=seconds,
        output_tokens_per_second=sum(timing.output_tokens for timing in timings) / seconds,
        ttft=statistics.median(timing.events[0] for timing in timings),
        itl=statistics.median(gaps) if gaps else None,
        tpot=statistics.median(rests),
    )
