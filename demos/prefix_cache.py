"""The prefix cache: what an earlier prompt began with is not computed again.

What to look at: the column "cached". The second and third question come after the same long instructions, so all whole
blocks of those are served from the cache, and the first token comes sooner. The last question has the same instructions
but for its first word: nothing after a difference can be reused.

    uv run main.py serve --model smollm2
    uv run demos/prefix_cache.py [base-url]
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from time import perf_counter
from uuid import uuid4

import openai
from rich.console import Console
from rich.table import Table

from demos.common import run

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
RULES = "You answer travellers' questions at a railway station. Be friendly, be brief, and name the platform. " * 12
HERE, ELSEWHERE = uuid4().hex, uuid4().hex  # new in each run, so that the first question meets an empty cache
QUESTIONS = (
    ("first of all", HERE, "When does the next train leave?"),
    ("same beginning", HERE, "Where can I buy a sandwich?"),
    ("same beginning", HERE, "Is there a place for my bicycle?"),
    ("other first word", ELSEWHERE, "Is there a place for my bicycle?"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What one question cost."""

    prompt_tokens: int
    cached_tokens: int
    ttft: float  # seconds


def main() -> None:
    """Ask one after the other, and compare."""
    console = Console(highlight=False)
    client = openai.OpenAI(base_url=BASE_URL, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0)
    model = client.models.list().data[0].id
    ask(client, model, "Be brief.", "Hello!")  # the first call of a process takes longer
    rows = [ask(client, model, f"{station} {RULES}", question) for _, station, question in QUESTIONS]
    table = Table("question", "prompt tokens", "cached", "time to first token")
    for (name, _, _), row in zip(QUESTIONS, rows, strict=True):
        table.add_row(name, str(row.prompt_tokens), str(row.cached_tokens), f"{row.ttft * 1e3:.0f} ms")
    console.print(table)
    if not rows[1].cached_tokens:
        sys.exit("nothing was cached: was the server started with --no-prefix-caching?")
    share = rows[1].cached_tokens / rows[1].prompt_tokens
    console.print(f"{share:.0%} of the second prompt came from the cache.")


def ask(client: openai.OpenAI, model: str, system: str, question: str) -> Row:
    """One short answer: usage says how much of the prompt was cached."""
    start = perf_counter()
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
        max_tokens=1,  # so the whole call is the time to first token
    )
    usage = answer.usage
    details = usage.prompt_tokens_details if usage else None
    cached_tokens = (details.cached_tokens if details else None) or 0
    return Row(usage.prompt_tokens if usage else 0, cached_tokens, perf_counter() - start)


if __name__ == "__main__":
    run(main, __doc__, BASE_URL)
