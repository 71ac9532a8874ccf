"""Mixed traffic for a soak: questions with known answers, asked in every way, aborts, and what must be refused.

A question is asked once of the quiet server; its answer is then golden, and whoever asks it again, streamed or not,
among whatever others, must get exactly that. Does not start the server, and does not judge what it measures.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RIGHT, WRONG, ABORTED, FAILED = "right", "wrong", "aborted", "failed"
ABORT_SHARE, REFUSED_SHARE, STREAMED_SHARE = 0.08, 0.12, 0.6
TOPICS = ("rivers", "bread", "the moon", "chess", "glaciers", "trains", "bees", "maps")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}


Content = list[tuple[str, str | None]]  # the text and the finish reason of each choice
Told = tuple[str, str, float | None]  # the verdict, its detail, and when the first piece of a stream came


@dataclass(frozen=True, slots=True)
class Question:
    """A request whose answer does not change: greedy, or with a seed."""

    kind: str
    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that must be refused: `body` as it goes over the wire, and the status of the answer."""

    kind: str
    path: str
    body: bytes
    status: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request went.

    Attributes:
        ended_at: seconds since the start of the traffic.
        clients: how many there were.
        first, seconds: until the first piece of a stream, and until the end.
        verdict: RIGHT, WRONG, ABORTED (by the client) or FAILED.
        detail: what was wrong.
    """

    kind: str
    ended_at: float
    clients: int
    first: float | None
    seconds: float
    verdict: str
    detail: str = ""


def questions() -> list[Question]:
    """Short and long ones, of both endpoints; several choices, constrained answers, logprobs, stop strings."""
    found = []
    for index, topic in enumerate(TOPICS):
        user = [{"role": "user", "content": f"Tell me something about {topic}."}]
        long = f"Notes on {topic}: " + " ".join(f"{topic} {number}," for number in range(40 + 10 * index))
        greedy = {"temperature": 0}
        found += [
            Question("chat", CHAT, {"messages": user, "max_tokens": 48, **greedy}),
            Question("chat, long answer", CHAT, {"messages": user, "max_tokens": 200, **greedy}),
            Question("completion", COMPLETIONS, {"prompt": f"The story of {topic} begins", "max_tokens": 32, **greedy}),
            Question("long prompt", COMPLETIONS, {"prompt": long, "max_tokens": 16, **greedy}),
            Question("choices", CHAT, {"messages": user, "n": 3, "seed": index, "temperature": 1, "max_tokens": 40}),
            Question("logprobs", COMPLETIONS, {"prompt": f"About {topic}:", "logprobs": 3, "max_tokens": 16, **greedy}),
            Question("stop string", CHAT, {"messages": user, "stop": [".", "\n"], "max_tokens": 60, **greedy}),
        ]
        schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
        asked = [{"role": "user", "content": f"Name a city known for {topic}, as JSON."}]
        found.append(
            Question("constrained", CHAT, {"messages": asked, "response_format": schema, "max_tokens": 60, **greedy})
        )
    return found


def refusals(max_model_len: int) -> list[Refusal]:
    """Over-long, malformed and impossible requests."""
    bodies = [
        ("over-long", {"prompt": "a " * 2 * max_model_len, "max_tokens": 4}, 400),
        ("no such model", {"prompt": "Hi", "model": "another"}, 404),
        ("temperature of 9", {"prompt": "Hi", "temperature": 9}, 400),
        ("no prompt", {"max_tokens": 4}, 400),
        ("impossible schema", {"prompt": "Hi", "guided_json": {"type": "no type"}}, 400),
    ]
    found = [Refusal(kind, COMPLETIONS, json.dumps(body).encode(), status) for kind, body, status in bodies]
    return [*found, Refusal("truncated JSON", CHAT, b'{"messages": [{"role": "us', 400)]


def content(body: Mapping[str, Any]) -> Content:
    """Of an answer: the text and the finish reason of each choice, in their order."""
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    return [(_text(choice, "message"), choice["finish_reason"]) for choice in choices]


def _text(choice: Mapping[str, Any], part: str) -> str:
    return (choice[part].get("content") or "") if part in choice else choice.get("text", "")


def streamed_content(events: Sequence[Mapping[str, Any]]) -> Content:
    """The same, of a stream's events."""
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        index = choice["index"]
        texts[index] = texts.get(index, "") + _text(choice, "delta")
        reasons[index] = choice["finish_reason"] or reasons.get(index)
    return [(texts[index], reasons[index]) for index in sorted(texts)]


async def golden_answers(http: httpx.AsyncClient, asked: Sequence[Question]) -> list[Content]:
    """One after the other, of a server that does nothing else.

    Raises:
        ValueError: one is not answered.
    """
    found = []
    for question in asked:
        answer = await http.post(question.path, json=question.body)
        if answer.status_code != 200:
            raise ValueError(f"{question.kind}: {answer.status_code} {answer.text[:300]}")
        found.append(content(answer.json()))
    return found


@dataclass
class Traffic:
    """Clients that ask without pause, each its own random choice; `outcomes` grows as they end."""

    http: httpx.AsyncClient
    questions: Sequence[Question]
    golden: Sequence[Content]
    refusals: Sequence[Refusal]
    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    num_clients: int = 0
    _start: float = 0.0

    async def run(self, clients_at: Callable[[float], int]) -> None:
        """Keep as many clients as `clients_at(seconds since the start)` says, until it says none; all finish."""
        self._start = time.perf_counter()
        clients: dict[int, asyncio.Task[None]] = {}
        while (wanted := clients_at(self.now())) > 0:
            self.num_clients = wanted
            for index in range(wanted):
                if index not in clients or clients[index].done():
                    clients[index] = asyncio.create_task(self._client(index))
            await asyncio.sleep(0.2)
        self.num_clients = 0
        await asyncio.gather(*clients.values())

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    async def _client(self, index: int) -> None:
        dice = random.Random(f"{self.seed}/{index}/{self.now():.0f}")
        while index < self.num_clients:
            kind, call = self._choose(dice)
            start, clients = self.now(), self.num_clients
            try:
                verdict, detail, first = await call
            except (httpx.HTTPError, ValueError, LookupError) as error:
                verdict, detail, first = FAILED, f"{type(error).__name__}: {error}", None
            seconds = self.now() - start
            since = None if first is None else first - start
            self.outcomes.append(Outcome(kind, self.now(), clients, since, seconds, verdict, detail[:500]))

    def _choose(self, dice: random.Random) -> tuple[str, Awaitable[Told]]:
        chance = dice.random()
        if chance < REFUSED_SHARE:
            refusal = dice.choice(self.refusals)
            return refusal.kind, self._refused(refusal)
        index = dice.randrange(len(self.questions))
        question, golden = self.questions[index], self.golden[index]
        if chance < REFUSED_SHARE + ABORT_SHARE:
            return question.kind, self._aborted(question, dice.randrange(1, 12))
        if dice.random() < STREAMED_SHARE:
            return question.kind, self._streamed(question, golden)
        return question.kind, self._plain(question, golden)

    async def _plain(self, question: Question, golden: Content) -> Told:
        answer = await self.http.post(question.path, json=question.body)
        if answer.status_code != 200:
            return FAILED, f"{answer.status_code} {answer.text}", None
        return *compared(content(answer.json()), golden), None

    async def _streamed(self, question: Question, golden: Content) -> Told:
        lines, first = await self._lines(question, None)
        if not lines or lines[-1] != "data: [DONE]":
            return FAILED, f"the stream ended with {lines[-1:]}", first
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        return *compared(streamed_content(events), golden), first

    async def _aborted(self, question: Question, num_events: int) -> Told:
        _, first = await self._lines(question, num_events)
        return ABORTED, "", first

    async def _lines(self, question: Question, most: int | None) -> tuple[list[str], float | None]:
        """The events of a stream, `most` of them if that is given, and when the first one came."""
        lines: list[str] = []
        first = None
        body = {**question.body, "stream": True}
        async with self.http.stream("POST", question.path, json=body) as answer:
            if answer.status_code != 200:
                raise ValueError(f"{answer.status_code} {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                if line:
                    first = first or self.now()
                    lines.append(line)
                if len(lines) == most:
                    break
        return lines, first

    async def _refused(self, refusal: Refusal) -> Told:
        headers = {"Content-Type": "application/json"}
        answer = await self.http.post(refusal.path, content=refusal.body, headers=headers)
        if answer.status_code == refusal.status and "error" in answer.json():
            return RIGHT, "", None
        return WRONG, f"{answer.status_code} in place of {refusal.status}: {answer.text}", None


def compared(found: Content, golden: Content) -> tuple[str, str]:
    """The verdict and its detail."""
    return (RIGHT, "") if found == golden else (WRONG, f"{found} in place of {golden}")
