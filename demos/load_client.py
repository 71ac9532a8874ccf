"""A load generator for any OpenAI-compatible server: open loop (Poisson arrivals) or closed (fixed concurrency).

Owns the prompts, the arrivals, the client's clock and the report. Knows no server from inside: times are those that a
user would see, token counts are the server's usage. Every answer is a stream.

    uv run demos/load_client.py [base-url] --requests 24 --gap 0.35
    uv run demos/load_client.py [base-url] --requests 64 --concurrency 8 --prompt-chars 4500 --out load.jsonl

Environment variables stand in for flags: LOAD_REQUESTS, LOAD_GAP, LOAD_PROMPT_CHARS, LOAD_MAX_TOKENS, LOAD_TIMEOUT,
LOAD_OUT and those that --help names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import string
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# fmt: off
WORDS = (
    "amber", "anchor", "autumn", "barley", "basket", "beacon", "bridge", "candle", "canyon", "carpet", "cherry",
    "cinder", "clover", "copper", "cotton", "dagger", "desert", "dragon", "ember", "engine", "fabric", "falcon",
    "feather", "ferry", "forest", "garden", "ginger", "glacier", "hammer", "harbour", "helmet", "island",
)
# fmt: on
HEAD_CHARS = 12  # random letters in front, so that no prompt shares a block with another, of this run or an earlier one
DEFAULT_GAP = 0.35  # seconds
PERCENTILES = (50, 90, 95, 99)
MAX_MESSAGE = 200  # characters of an error in the JSONL


# What is asked for


@dataclass(frozen=True, slots=True)
class Load:
    """One run.

    Attributes:
        requests: how many.
        gap: mean seconds between two arrivals, exponentially distributed; 0 sends all at once.
        concurrency: so many requests at any time, in place of arrivals; None for arrivals.
        prompt_chars: length of each prompt, in characters.
        shared_chars: of those, so many at the beginning are the same for all.
        max_tokens: output tokens of each request, at most.
        timeout: seconds that a request may take.
        seed: of prompts and arrivals. The same seed against the same server meets its prefix cache.
        chat: ask as a conversation; else as a plain completion, in which no chat template is shared.
        ignore_eos: let each answer have all its tokens; a field of miniserve and vLLM.
    """

    base_url: str
    model: str
    requests: int = 24
    gap: float = DEFAULT_GAP
    concurrency: int | None = None
    prompt_chars: int = 400
    shared_chars: int = 0
    max_tokens: int = 64
    timeout: float = 120.0
    seed: int = 0
    chat: bool = False
    ignore_eos: bool = False

    def prompt(self, index: int) -> str:
        """Text of the asked length, its own from the first character after the shared part on."""
        shared = _text(f"{self.seed}/shared", self.shared_chars)
        return shared + _text(f"{self.seed}/{index}", self.prompt_chars - self.shared_chars)

    def arrivals(self) -> list[float]:
        """When each request is sent, in seconds from the start. The first does not wait."""
        dice = random.Random(f"{self.seed}/arrivals")
        times = [0.0]
        while len(times) < self.requests:
            times.append(times[-1] + (dice.expovariate(1 / self.gap) if self.gap else 0.0))
        return times

    def body(self, index: int) -> dict[str, Any]:
        """The request's JSON."""
        prompt = self.prompt(index)
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        extra = {"ignore_eos": True} if self.ignore_eos else {}
        fixed = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, "max_tokens": self.max_tokens} | asked | fixed | extra


def _text(seed: str, num_chars: int) -> str:
    dice = random.Random(seed)
    head = "".join(dice.choices(string.ascii_lowercase, k=HEAD_CHARS))
    words = dice.choices(WORDS, k=num_chars // 5)  # a word and its space have at least six characters
    return " ".join((head, *words))[: max(num_chars - 1, 0)] + "." * (num_chars > 0)


# One request


@dataclass(slots=True)
class Result:
    """What the client saw of one request. Seconds; None where it did not come to that.

    Attributes:
        sent_at: from the start of the run.
        ttft: until the first text.
        e2e: until the end of the stream, or until the error.
        itl: the gaps between the pieces of text, of which each has one token or more.
        error: its kind: "timeout", "connection", "http 429", "stream", "incomplete"; None when all went well.
    """

    index: int
    sent_at: float
    request_id: str | None = None
    ttft: float | None = None
    e2e: float = 0.0
    itl: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    message: str | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first one."""
        if self.ttft is None or self.completion_tokens is None or self.completion_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.completion_tokens - 1)

    def to_json(self) -> str:
        """One line of the JSONL, times to the microsecond."""
        known = asdict(self) | {"tpot": self.tpot}
        rounded = {key: round(value, 6) if isinstance(value, float) else value for key, value in known.items()}
        return json.dumps(rounded | {"itl": [round(gap, 6) for gap in self.itl]})


class LoadError(Exception):
    """A request that went wrong: its kind, and what was said."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


async def ask(client: httpx.AsyncClient, load: Load, index: int, start: float) -> Result:
    """Send one request now, and read its stream; never raises for what the server or the network does."""
    body = load.body(index)
    sent = time.perf_counter()
    result = Result(index, sent_at=sent - start)
    try:
        async with asyncio.timeout(load.timeout):
            await _read(client, load, body, sent, result)
    except TimeoutError:
        _fail(result, "timeout", f"not done within {load.timeout:g} s")
    except LoadError as error:
        _fail(result, error.kind, str(error))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        _fail(result, "connection", f"{type(error).__name__}: {error}")
    result.e2e = time.perf_counter() - sent
    return result


def _fail(result: Result, kind: str, message: str) -> None:
    result.error, result.message = kind, message[:MAX_MESSAGE]


async def _read(client: httpx.AsyncClient, load: Load, body: dict[str, Any], sent: float, result: Result) -> None:
    url = f"{load.base_url}/{'chat/completions' if load.chat else 'completions'}"
    last: float | None = None
    async with client.stream("POST", url, json=body) as response:
        result.request_id = response.headers.get("x-request-id")
        if response.status_code != 200:
            raise LoadError(f"http {response.status_code}", (await response.aread()).decode(errors="replace"))
        async for event in _events(response):
            try:
                if not _take(event, result):
                    continue
            except (AttributeError, TypeError) as error:
                raise LoadError("stream", f"an event has another form than OpenAI's: {event}") from error
            now = time.perf_counter()
            if last is None:
                result.ttft = now - sent
            else:
                result.itl.append(now - last)
            last = now
    if result.finish_reason is None:
        raise LoadError("incomplete", "the stream ended without a finish reason")


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream, up to [DONE]."""
    done = False
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        done = done or data == "[DONE]"
        if done or not line.startswith("data:"):  # read on to the end, or the connection could not be used again
            continue
        try:
            event = json.loads(data)
        except ValueError as error:
            raise LoadError("stream", f"an event is no JSON: {data}") from error
        if not isinstance(event, dict) or "error" in event:
            raise LoadError("stream", data)
        yield event
    if not done:
        raise LoadError("incomplete", "the stream ended without [DONE]")


def _take(event: dict[str, Any], result: Result) -> bool:
    """Note counts and the finish reason; whether the event has text."""
    if usage := event.get("usage"):
        result.prompt_tokens = usage.get("prompt_tokens")
        result.completion_tokens = usage.get("completion_tokens")
        result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    text = False
    for choice in event.get("choices") or ():
        result.finish_reason = choice.get("finish_reason") or result.finish_reason
        delta = choice.get("delta") or {}
        text = text or bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))
    return text


# The run


async def run(load: Load, headers: Mapping[str, str], done: Callable[[Result], None]) -> tuple[list[Result], float]:
    """All results by index, and the seconds from the start to the last end. `done` hears of each at its end."""
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)  # before the server closes what is idle
    async with httpx.AsyncClient(timeout=None, limits=limits, headers=headers) as client:
        await _warm_up(client, load.base_url)
        start = time.perf_counter()
        queue = iter(range(load.requests))
        results: list[Result] = []

        async def one(index: int) -> None:
            results.append(await ask(client, load, index, start))
            done(results[-1])

        async def later(index: int, seconds: float) -> None:
            await asyncio.sleep(start + seconds - time.perf_counter())
            await one(index)

        async def worker() -> None:
            for index in queue:
                await one(index)

        async with asyncio.TaskGroup() as group:
            if load.concurrency is None:
                for index, seconds in enumerate(load.arrivals()):
                    group.create_task(later(index, seconds))
            for _ in range(load.concurrency or 0):
                group.create_task(worker())
        return sorted(results, key=lambda result: result.index), time.perf_counter() - start


async def _warm_up(client: httpx.AsyncClient, base_url: str) -> None:
    """What a first call costs in this process, imports above all, is not the first request's."""
    with suppress(httpx.HTTPError, httpx.InvalidURL):
        await client.get(f"{base_url}/models", timeout=10)


# The report


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of the values do not exceed (nearest rank)."""
    return sorted(values)[max(math.ceil(percent / 100 * len(values)) - 1, 0)]


def report(console: Console, load: Load, results: Sequence[Result], seconds: float) -> None:
    """Counts, rates and percentiles of what succeeded; the errors by kind."""
    good = [result for result in results if result.error is None]
    output_tokens = _total(result.completion_tokens for result in good)
    prompt_tokens = _total(result.prompt_tokens for result in good)
    pace = f"concurrency {load.concurrency}" if load.concurrency is not None else f"mean gap {load.gap:g} s"
    console.print(f"{len(results)} requests to {load.model}, {pace}, seed {load.seed}; {seconds:.2f} s in all")
    console.print(f"prompts: {load.prompt_chars} characters, of which shared: {load.shared_chars}")
    console.print(
        f"succeeded {len(good)}, failed {len(results) - len(good)}; {len(good) / seconds:.2f} requests/s, "
        f"{output_tokens / seconds:.1f} output tokens/s"
    )
    cached_tokens = _total(result.cached_tokens for result in good)
    console.print(f"prompt tokens {prompt_tokens} (cached {cached_tokens}), output tokens {output_tokens}")
    console.print(_times(good))
    for kind, number in Counter(result.error for result in results if result.error is not None).most_common():
        example = next(result.message for result in results if result.error == kind)
        console.print(f"error: {kind}: {number}, such as: {example}", markup=False)


def _total(counts: Any) -> int:
    return sum(count or 0 for count in counts)


def _times(good: Sequence[Result]) -> Table:
    table = Table("ms", "mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    times: dict[str, list[float]] = {
        "TTFT": [result.ttft for result in good if result.ttft is not None],
        "ITL": [gap for result in good for gap in result.itl],
        "TPOT": [result.tpot for result in good if result.tpot is not None],
        "E2E": [result.e2e for result in good],
    }
    for name, values in times.items():
        shown = (fmean(values), *(percentile(values, percent) for percent in (*PERCENTILES, 100))) if values else ()
        table.add_row(name, *(f"{value * 1e3:.1f}" for value in shown))
    for column in table.columns[1:]:
        column.justify = "right"
    return table


# The command


def main(argv: Sequence[str] | None = None) -> int:
    """Run a load; 0 when all requests succeeded."""
    parser = _parser()
    asked = parser.parse_args(argv)
    _check(parser, asked)
    headers = {"Authorization": f"Bearer {asked.api_key}"} if asked.api_key else {}
    base_url = asked.base_url.rstrip("/")
    try:
        httpx.URL(base_url)
    except httpx.InvalidURL as error:
        sys.exit(f"{base_url[:MAX_MESSAGE]} is no URL of a server: {error}; give one like http://127.0.0.1:8000/v1")
    load = _load(asked, base_url, asked.model or first_model(base_url, headers))
    try:
        sink = nullcontext(None) if asked.out is None else asked.out.open("w", encoding="utf-8")
    except OSError as error:
        parser.error(f"--out {asked.out} cannot be written: {error.strerror}")
    with sink as out:
        results, seconds = _run_with_bar(load, headers, out)
    report(Console(highlight=False), load, results, seconds)
    return 1 if any(result.error for result in results) else 0


def _run_with_bar(load: Load, headers: Mapping[str, str], out: TextIO | None) -> tuple[list[Result], float]:
    console = Console(stderr=True)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("requests", total=load.requests)
        answered = 0

        def done(result: Result) -> None:
            nonlocal answered
            answered += result.error is None
            bars.advance(bar)
            if out is not None:  # at once: a run that is broken off leaves what it has
                print(result.to_json(), file=out, flush=True)

        try:
            return asyncio.run(run(load, headers, done))
        except KeyboardInterrupt:
            bars.stop()
            print(f"interrupted: {answered} of {load.requests} requests were answered", file=sys.stderr)
            raise


def first_model(base_url: str, headers: Mapping[str, str]) -> str:
    """The first model that the server lists."""
    try:
        reply = httpx.get(f"{base_url}/models", headers=headers, timeout=30)
        if reply.status_code != 200:
            sys.exit(f"{base_url}/models answers {reply.status_code}; check the URL and --api-key, or give --model")
        return str(reply.json()["data"][0]["id"])
    except httpx.TransportError as error:
        sys.exit(f"no server at {base_url} ({error}); start one: uv run main.py serve --model smollm2")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        sys.exit(f"{base_url}/models names no model ({error}); check the URL, or give --model")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Send a load to an OpenAI-compatible server, and report latencies.",
        epilog="Where a flag and its environment variable are both given, the flag wins.",
    )
    parser.add_argument("base_url", nargs="?", default="http://127.0.0.1:8000/v1", help="default: %(default)s")

    def add(name: str, kind: Callable[[str], Any], default: Any, text: str) -> None:
        variable = f"LOAD_{name.upper().replace('-', '_')}"
        shown = "" if default is None else f"; default: {default}"
        given = os.environ.get(variable) or default  # argparse parses it as if it were the flag's
        parser.add_argument(f"--{name}", type=kind, default=given, help=f"{text}{shown} [{variable}]")

    add("model", str, None, "default: the first one that the server lists")
    add("requests", int, 24, "how many")
    add("gap", float, None, f"mean seconds between two arrivals (Poisson); 0: all at once; default: {DEFAULT_GAP}")
    add("concurrency", int, None, "keep so many requests running, in place of --gap")
    add("prompt-chars", int, 400, "length of a prompt, in characters")
    add("shared-chars", int, 0, "so many of them, at the beginning, are the same in all prompts")
    add("max-tokens", int, 64, "output tokens of a request, at most")
    add("timeout", float, 120.0, "seconds that a request may take")
    add("out", Path, None, "write a JSON line for each request to this file")
    add("seed", int, None, "of prompts and arrivals; default: another one each time")
    parser.add_argument("--chat", action="store_true", help="ask /chat/completions, not /completions")
    parser.add_argument("--ignore-eos", action="store_true", help="answers of --max-tokens (miniserve, vLLM)")
    key = os.environ.get("OPENAI_API_KEY")
    parser.add_argument("--api-key", default=key, help="default: $OPENAI_API_KEY")
    return parser


def _check(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    for name, least in (("requests", 1), ("concurrency", 1), ("prompt_chars", 1), ("max_tokens", 1), ("gap", 0)):
        value = getattr(asked, name)
        if value is not None and not least <= value < math.inf:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    if not 0 < asked.timeout < math.inf:
        parser.error(f"--timeout is {asked.timeout}; it must be more than 0 seconds")
    if asked.gap is not None and asked.concurrency is not None:
        parser.error("--gap and --concurrency exclude each other: give one (LOAD_GAP and LOAD_CONCURRENCY count too)")
    if not 0 <= asked.shared_chars <= asked.prompt_chars:
        parser.error(f"--shared-chars is {asked.shared_chars}; it must be from 0 to --prompt-chars")
    if 0 < asked.prompt_chars - asked.shared_chars <= HEAD_CHARS:
        parser.error(f"--prompt-chars must leave more than {HEAD_CHARS} characters to tell the prompts apart")


def _load(asked: argparse.Namespace, base_url: str, model: str) -> Load:
    resolved = {
        "base_url": base_url,
        "model": model,
        "gap": DEFAULT_GAP if asked.gap is None else asked.gap,
        "seed": random.SystemRandom().getrandbits(32) if asked.seed is None else asked.seed,
    }
    return Load(**{each.name: resolved.get(each.name, getattr(asked, each.name)) for each in fields(Load)})


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
