"""Continuous batching: a short request that comes late does not wait for the long ones before it.

What to look at: the short request's bar starts when the long ones are under way, and is the first to be full. With
static batching it would have had to wait for the whole batch.

    uv run main.py serve --model smollm2
    uv run demos/continuous_batching.py [base-url] [prompt]
"""

from __future__ import annotations

import asyncio
import os
import sys
from time import perf_counter

import openai
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from demos.common import run

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
PROMPT = sys.argv[2] if len(sys.argv) > 2 else "Tell me a long story about a lighthouse."
LONG_REQUESTS, LONG_TOKENS, SHORT_TOKENS = ("long 1", "long 2", "long 3"), 120, 8
COLUMNS = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


async def main() -> None:
    """Show how the requests advance, then in which order they ended."""
    console = Console(highlight=False)
    async with openai.AsyncOpenAI(
        base_url=BASE_URL, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0
    ) as client:
        model = (await client.models.list()).data[0].id
        with Progress(*COLUMNS, console=console) as bars:
            ends = await race(client, model, bars)
    console.print("\nIn the order of their ends:")
    for name, sent, ended in ends:
        console.print(f"  {name:8} sent at {sent:5.2f} s, ended at {ended:5.2f} s")
    if ends[0][0] != "short":
        sys.exit("the short request was not the first to end: does the server run fewer than 4 requests at once?")
    console.print("The short one overtook all the others.")


async def race(client: openai.AsyncOpenAI, model: str, bars: Progress) -> list[tuple[str, float, float]]:
    """Each request's name, and when it was sent and ended, by its end."""
    start = perf_counter()
    ends: list[tuple[str, float, float]] = []

    async def ask(name: str, max_tokens: int, under_way: asyncio.Event) -> None:
        bar, sent = bars.add_task(name, total=max_tokens), perf_counter() - start
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=max_tokens,
            stream=True,
            extra_body={"ignore_eos": True},  # a field of miniserve and vLLM: the answers are as long as asked
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                under_way.set()
                bars.advance(bar)
        bars.update(bar, completed=max_tokens)  # a piece can hold several tokens
        ends.append((name, sent, perf_counter() - start))

    async with asyncio.TaskGroup() as group:
        under_way = {name: asyncio.Event() for name in LONG_REQUESTS}
        for name, event in under_way.items():
            group.create_task(ask(name, LONG_TOKENS, event))
        for event in under_way.values():
            await event.wait()
        group.create_task(ask("short", SHORT_TOKENS, asyncio.Event()))
    return ends


if __name__ == "__main__":
    run(lambda: asyncio.run(main()), __doc__, BASE_URL)
