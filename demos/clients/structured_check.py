"""Many answers at once that keep to JSON schemas: are all of them valid, and what do they cost?

What to look at: the number of valid answers, and the output tokens per second beside those of the same load without
schemas: the same prompts, each answer as long as its twin. Both come in turns, round after round, as the speed of a
machine changes with what else it does.

    uv run main.py serve --model smollm2
    uv run demos/clients/structured_check.py [base-url] [model] [requests] [rounds]
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import httpx
from jsonschema import Draft202012Validator

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "smollm2"
NUM_REQUESTS = int(sys.argv[3]) if len(sys.argv) > 3 else 200
NUM_ROUNDS = int(sys.argv[4]) if len(sys.argv) > 4 else 3
MAX_TOKENS = 400

WORD = {"type": "string", "minLength": 1, "maxLength": 12}
YEAR = {"type": "integer", "minimum": 1900, "maximum": 2030}


def record(**properties: Any) -> dict[str, Any]:
    """An object that has exactly these properties."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def several(items: Any, most: int = 3) -> dict[str, Any]:
    """An array of one to `most` items."""
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


TREE = record(name=WORD, child={"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]})
SCHEMAS: tuple[dict[str, Any], ...] = (
    record(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}),
    record(city=WORD, country=WORD, capital={"type": "boolean"}),
    record(title=WORD, year=YEAR, rating={"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.5}),
    record(colour={"enum": ["red", "green", "blue"]}, shade={"enum": [1, 2, 3, None]}),
    record(
        person=record(first=WORD, last=WORD), address=record(street=WORD, number={"type": "integer", "maximum": 999})
    ),
    record(tags=several(WORD, 5)),
    record(points=several(record(x={"type": "integer", "minimum": -9, "maximum": 9}, y={"enum": [0, 1]}))),
    several({"enum": ["Montag", "Dienstag", "Samstag", "日曜日", "воскресенье", "café"]}, 4),
    record(kind={"const": "circle"}, radius={"type": "integer", "minimum": 1, "exclusiveMaximum": 100}),
    {"anyOf": [record(kind={"const": "cat"}, lives={"enum": [7, 9]}), record(kind={"const": "dog"}, name=WORD)]},
    record(value={"type": ["integer", "null"], "minimum": 0, "maximum": 1000}, unit={"enum": ["µg", "mg", "g"]}),
    {**record(tree=TREE), "$defs": {"leaf": record(name=WORD)}},
    record(born={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    record(email={"type": "string", "pattern": "^[a-z]{3,8}@example\\.org$"}),
    record(code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, ok={"type": "boolean"}),
    {"type": "array", "prefixItems": [WORD, YEAR, {"type": "boolean"}], "items": False, "minItems": 3},
    record(matrix={"type": "array", "items": several({"enum": [0, 1]}, 2), "minItems": 2, "maxItems": 2}),
    {
        "type": "object",
        "properties": {"a": YEAR, "b": WORD, "c": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    record(level1=record(level2=record(level3=record(level4=record(value={"enum": ["deep"]}))))),
    {"enum": ["yes", "no", "perhaps", 42, None, True]},
)


async def ask(client: httpx.AsyncClient, index: int, **fields: Any) -> dict[str, Any]:
    """The answer to request number `index`."""
    messages = [{"role": "user", "content": f"Request {index}. Write a record of something that you know, as JSON."}]
    body = {"model": MODEL, "messages": messages, "seed": index, **fields}
    answer = await client.post(f"{BASE_URL}/chat/completions", json=body)
    answer.raise_for_status()
    return dict(answer.json())


async def run(client: httpx.AsyncClient, fields: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], float]:
    """All answers, asked for at once, and their output tokens per second."""
    start = time.perf_counter()
    answers = await asyncio.gather(*(ask(client, index, **own) for index, own in enumerate(fields)))
    num_tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    return list(answers), num_tokens / (time.perf_counter() - start)


def fault(answer: dict[str, Any], schema: dict[str, Any]) -> str | None:
    """What is wrong with an answer; None if it is valid."""
    choice = answer["choices"][0]
    try:
        value = json.loads(choice["message"]["content"])
    except ValueError as error:
        return f"{error}, finish_reason {choice['finish_reason']}: {choice['message']['content']!r:.200}"
    first = next(
        Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).iter_errors(value), None
    )
    return None if first is None else f"{first.message:.200}"


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    """The field of a request."""
    return {"type": "json_schema", "json_schema": {"name": "record", "schema": schema, "strict": True}}


@dataclass(frozen=True, slots=True)
class Round:
    """What one round gave: faults by request, and output tokens per second with schemas and without."""

    faults: dict[int, str]
    num_tokens: int
    rate: float
    free_rate: float


async def one_round(client: httpx.AsyncClient, schemas: list[dict[str, Any]]) -> Round:
    """Ask with schemas, check, and ask again without."""
    asked = [{"response_format": response_format(schema), "max_tokens": MAX_TOKENS} for schema in schemas]
    answers, rate = await run(client, asked)
    lengths = [answer["usage"]["completion_tokens"] for answer in answers]
    _, free_rate = await run(client, [{"max_tokens": length, "ignore_eos": True} for length in lengths])
    checked = [fault(answer, schema) for answer, schema in zip(answers, schemas, strict=True)]
    faults = {index: text for index, text in enumerate(checked) if text is not None}
    return Round(faults, sum(lengths), rate, free_rate)


async def main() -> int:
    """Round after round, and the median of their ratios."""
    schemas = [SCHEMAS[index % len(SCHEMAS)] for index in range(NUM_REQUESTS)]
    rounds = []
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        formats = [response_format(schema) for schema in schemas[: len(SCHEMAS)]]
        await run(client, [{"response_format": own, "max_tokens": 1} for own in formats])  # compile
        for _ in range(NUM_ROUNDS):
            rounds.append(done := await one_round(client, schemas))
            for index, text in done.faults.items():
                print(f"request {index}: {text}")
            print(
                f"{NUM_REQUESTS - len(done.faults)} of {NUM_REQUESTS} answers valid, {len(SCHEMAS)} schemas, "
                f"{done.num_tokens} tokens; output tokens/s: {done.rate:.1f} with schemas, {done.free_rate:.1f} "
                f"without: {done.rate / done.free_rate:.1%}"
            )
    print(f"median of {NUM_ROUNDS} rounds: {statistics.median(done.rate / done.free_rate for done in rounds):.1%}")
    return 1 if any(done.faults for done in rounds) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
